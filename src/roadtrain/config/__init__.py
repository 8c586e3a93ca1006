"""Files that users write (jobs, clusters, models and plans), as typed and checked values.

The values are frozen, and the code here only does arithmetic on them: no torch, sockets or clock.
Read `job.py` first.
"""
