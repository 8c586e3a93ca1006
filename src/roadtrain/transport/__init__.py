"""Links that carry bytes between nodes: TCP, shared memory, and within a process.

A link delivers frames in order or is lost; no frame is delivered in part. Every wait has a
deadline, and a peer must prove the job's token before a frame is read. Read `link.py`, the
interface of all links, first. `plugins.py` finds links of other distributions.
"""
