"""The files that users write: jobs, clusters, models and plans, typed and checked.

Frozen values, and arithmetic on them; no torch, sockets or clock. Read `job.py` first.
"""
