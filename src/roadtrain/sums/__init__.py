"""The summation service: the CPUs of all hosts sum the gradients, and the workers apply the update.

Spare hosts, which only sum, may be added and removed during training. Start reading at `sums.py`.
"""
