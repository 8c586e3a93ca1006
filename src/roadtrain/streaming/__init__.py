"""Code that runs the blocks of a torch module on fetched parameters.

The parameters of a block are on the device only while the block computes. When the backward of a
block has ended, the block's gradients are sent to the servers. Reading a parameter that is not on
the device raises an error (Rule 6). Read `block_stream.py` first, then `split.py`.
"""
