"""Option values and their checks: budgets, compression, delay, names, and the schema of files.

A value checks itself when it is made, and a wrong option is a ConfigError that names it, what was
given and what is accepted. Read `check.py` first (options of functions and values), then
`schema.py` (options in files).
"""
