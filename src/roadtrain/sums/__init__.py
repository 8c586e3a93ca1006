"""The summation service: the CPUs of all hosts sum the gradients, and the workers apply the update.

Every host adds gradients in the order of the workers, so the bits of a sum do not depend on the
spare hosts. Spare hosts may be added and removed during training. Start reading at `sums.py`.
"""
