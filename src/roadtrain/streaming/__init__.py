"""How a block of a torch module runs on fetched parameters.

Parameters are on the device while their block computes, and gradients leave as each block finishes;
a parameter that is not there refuses to be read (Rule 6). Read `block_stream.py`
first, then `split.py`.
"""
