"""Simulate a step of a plan on a cluster that need not exist. The result contains the step time,
busy resources, memory, energy and cost.

The state machines of real processes run on a virtual clock (Rule 7). A simulation gives the same
floats every time. Read `run.py` first, then `scene.py` (which lays a plan out on a cluster),
`step.py` and `simulated_server.py` (which drive the state machines), `fabric.py` (which computes
the costs of transfers and updates) and `engine.py` (the clock).
"""
