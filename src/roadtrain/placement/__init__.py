"""The user's one line: place(), the optimizer that it returns, state dicts."""
