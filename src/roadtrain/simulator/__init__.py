"""Simulate a step of a plan on a cluster that need not exist: the state machines of servers,
relays, switches, sums and stages run on a virtual clock. The result contains the step time, busy
resources, memory, energy and cost.

A simulation gives the same floats every time, and runs the same state machines as real processes
(Rule 7). Read `run.py` first, then `scene.py` (which lays a plan out on a cluster), `step.py` and
`simulated_server.py` (which drive the state machines), `fabric.py` (which computes the costs of
transfers and updates) and `engine.py` (the clock).
"""
