"""Pipeline stages and process groups. A pipeline stage is a part of the model that some ranks
train.

Stages may differ in width (the number of replicas) and size (the number of blocks). Each process
group may use its own network. Every way of cutting the model into stages gives bit-identical
results. Read `parallelize.py` first.
"""
