"""Relay: a process on each host that communicates with the servers for all workers of the host.

The relay pulls parameters once for all workers. It sums the workers' gradients and sends only the
sum to the servers. The results are bit-identical to those without a relay (Rule 1). Read `route.py`
(the workers' side) first, then `relay.py`.
"""
