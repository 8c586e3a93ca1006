"""Define and check options: memory budgets, compression of gradients, and delayed updates.

An option such as `TopK` checks its values when it is created. An invalid value raises a ConfigError
with the name of the option, the invalid value, and the accepted values. Read `check.py` first: it
checks options that Python code passes. Then read `schema.py`: it checks options in files.
"""
