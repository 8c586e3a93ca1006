"""Option values and their checks: budgets, compression, delay, names, and the schema of files.

A value checks itself when it is created. An invalid option raises a ConfigError with its name, the
value and what is accepted. Read `check.py` first (options of functions and values), then
`schema.py` (options in files).
"""
