"""place(), the optimizer that it returns, and the state dicts of the placed model and optimizer.

Read `place.py` first.
"""
