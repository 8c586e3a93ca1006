"""Option values and their checks: budgets, compression, delay, names, and the schema of files.

An option value checks itself when it is created. An invalid option raises a ConfigError with the
name of the option, its value, and the values that are accepted. Read `check.py` first (options of
functions and values), then `schema.py` (options in files).
"""
