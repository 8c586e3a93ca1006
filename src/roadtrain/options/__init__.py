"""Option values and their checks: budgets, compression, delay, names, and the schema of files."""
