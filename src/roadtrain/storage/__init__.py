"""Storage of a job's state in files: a committed step survives a kill and a power cut at any
moment.

Start with `tier.py` (the rules of a store), then read `file.py` and `ledger.py`.
"""
