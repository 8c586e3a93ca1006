"""Pipeline stages and process groups. They determine which processes work together, over which
network, and on which part of the model.

Stages may differ in width (the number of replicas) and size (the number of blocks). Each process
group may use its own network. Results are the same to the bit, however the model is cut into
stages. Read `parallelize.py` first.
"""
