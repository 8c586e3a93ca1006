"""Relay: a process on each host that communicates with the servers for all workers of the host. The
results are bit-identical to those without a relay (Rule 1). Read `route.py` first, then `relay.py`.
"""
