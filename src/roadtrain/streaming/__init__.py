"""Running the blocks of a torch module on fetched parameters.

The parameters of a block are on the device only while the block computes. The gradients of the
block are sent to the servers at the end of its backward. Reading a parameter that is not on the
device raises an error (Rule 6). Read `block_stream.py` first, then `split.py`.
"""
