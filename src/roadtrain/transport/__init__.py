"""Links that carry bytes between nodes: TCP, shared memory, and within a process.

A link delivers frames in order until it is closed or lost, and never delivers a part of a frame.
Every wait has a deadline. A peer must prove that it has the job's token before a frame is read.
Read `link.py` first: it defines the interface of all links. `plugins.py` finds the kinds of links
that other installed distributions provide.
"""
