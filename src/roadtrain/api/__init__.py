"""The user's face: place(), the optimizer that it returns, state dicts."""
