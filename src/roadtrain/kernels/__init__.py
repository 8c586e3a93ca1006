"""How numbers change: update rules, sums, casts and codecs on flat arrays, without I/O.

Every kernel is compiled (numba, and Triton on GPUs) and equals its plain reference bit for bit;
update rules agree with torch's optimizers to 2 ulp per step (Rule 1). Read `rule.py` first, then
`optimizers.py`, the table of all rules.
"""
