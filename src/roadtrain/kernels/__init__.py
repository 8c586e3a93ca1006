"""Numeric kernels on flat arrays, without I/O: update rules, sums, casts and codecs.

Every kernel is compiled and gives the same bits as its plain reference. Update rules agree with
torch's optimizers to 2 ulp per step. Read `rule.py` first, then `optimizers.py`.
"""
