"""The user's one line: place(), the optimizer that it returns, and state dicts.

The model keeps its modules and the optimizer its class and groups. A job that cannot fit is refused
before anything is changed (Rule 4). Read `place.py` first.
"""
