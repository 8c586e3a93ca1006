"""Pipeline stages and process groups. A pipeline stage is a part of the model, which one or more
ranks train. A process group is a set of ranks that communicate with each other.

Stages may differ in width (the number of replicas) and size (the number of blocks). Each process
group may use its own network. Every way of cutting the model into stages gives bit-identical
results. Read `parallelize.py` first.
"""
