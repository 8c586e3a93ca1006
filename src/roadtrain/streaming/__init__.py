"""How the blocks of a torch module run on fetched parameters.

A block's parameters are on the device while it computes, and its gradients leave as it finishes.
Reading a parameter that is not there raises an error (Rule 6). Read `block_stream.py` first, then
`split.py`.
"""
