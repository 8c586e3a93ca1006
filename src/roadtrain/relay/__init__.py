"""A process on each host that communicates with the servers on behalf of the host's workers.

It pulls parameters once for all workers of the host and sums their gradients before they leave it.
The results are bit-identical (Rule 1). Read `route.py` (the workers' side) first, then `relay.py`.
"""
