"""The summation service: CPUs of all machines sum the gradients, and the workers update.

Sums run in the order of the workers, whichever host adds them up, so that the bits do not depend on
which spare hosts there are. Spare hosts come and go while training goes on. Read `sums.py` first.
"""
