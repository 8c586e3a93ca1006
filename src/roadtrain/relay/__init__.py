"""A host's agent beside the network card, which communicates on behalf of the host's workers.

Parameters are pulled once for all workers of the host, and their gradients are summed before they
leave. The bits stay the same (Rule 1). Read `route.py` first (the workers' side), then `relay.py`.
"""
