"""Parameter servers and their workers. A server applies the update rule to pushed gradients and
answers pulls with the new parameters.

The same state machines (`protocol/`) run in a thread of this process and in `roadtrain serve`; only
the link differs. Read `session.py` first (a worker's links to its servers), then `worker.py` and
`server.py`. `routes.py` describes how a worker reaches servers on other hosts.
"""
