"""Define and check options: memory budgets, compression of gradients, and delayed updates. Read
`check.py` first, for options that Python code passes, then `schema.py`, for options in files."""
