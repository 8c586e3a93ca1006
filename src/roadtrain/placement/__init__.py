"""place(), the optimizer that it returns, and the state dicts of the placed model and optimizer.

A job that does not fit into memory is refused before anything is changed. Read `place.py` first.
"""
