"""The state machines of servers, relays, switches, sums and stages on a virtual clock: how long a
step of a plan takes on a cluster that need not exist, what was busy, memory, energy and cost.

A run gives the same floats every time, and what is simulated is what runs (Rule 7). Read `run.py`
first, then `scene.py` (a plan laid out on a cluster), `step.py` and `simulated_server.py` (what
drives the state machines), `fabric.py` (what an action costs) and `engine.py` (the clock).
"""
