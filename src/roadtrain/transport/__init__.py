"""How bytes cross a link: TCP, shared memory, and inside a process.

A link carries frames in order or is lost, and no frame arrives in part. Every wait has a deadline
(Rule 5), and a peer proves the job's token before a frame is read (Rule 8). Read `link.py` first:
it is the interface that all links have. `plugins.py` finds those of other distributions.
"""
