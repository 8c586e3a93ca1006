"""Numeric kernels on flat arrays, without I/O: update rules, sums, casts and codecs.

Every kernel is compiled (numba, and Triton on GPUs) and matches its plain reference bit for bit;
update rules agree with torch's optimizers to 2 ulp per step (Rule 1). Read `rule.py` first, then
`optimizers.py`, the table of all rules.
"""
