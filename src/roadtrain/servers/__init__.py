"""Parameter servers and their workers. Workers push gradients to a server and pull parameters from
the server, which applies the update rule.

A server runs either in the worker's process or in a process of `roadtrain serve`.
"""
