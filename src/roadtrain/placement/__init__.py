"""place(), the optimizer that it returns, and their state dicts.

A job that cannot fit is refused before anything is changed. Read `place.py` first.
"""
