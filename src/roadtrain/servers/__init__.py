"""Parameter servers and their workers: a server turns pushes into pulls by a rule.

The same state machines (`protocol/`) run in a thread of this process and in `roadtrain serve`; only
the link differs. Read `session.py` first (a worker's links to its servers), then `worker.py` and
`server.py`; `routes.py` says how a worker reaches servers that are elsewhere.
"""
