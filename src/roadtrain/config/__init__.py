"""Files that users write (jobs, clusters, models and plans), as typed and checked values.

The values are frozen. This package only does arithmetic on them, without torch, sockets or clock.
Read `job.py` first.
"""
