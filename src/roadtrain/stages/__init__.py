"""Pipeline stages and process groups. They determine which processes work together, over which
network, and on which part of the model.

Stages may differ in width and size, and each process group may use its own network. Results are the
same to the bit, however the model is cut into stages. Read `parallelize.py` first.
"""
