"""Parameter servers and their workers. Workers push gradients to a server and pull parameters from
the server. The server applies the update rule.

A server runs either in the worker's process or in a process of `roadtrain serve`. Both kinds of
servers run the same state machines (`protocol/`); only the links to the workers differ. Read
`session.py` first (a worker's links to its servers), then `worker.py` and `server.py`. `routes.py`
describes how a worker reaches servers on other hosts.
"""
