"""Groups and stages: which processes work together, over which network, on which part of the
model.

A pipeline's stages may have different widths and sizes, and each process group a network of its
own. The bits do not depend on how a model is cut. Read `parallelize.py` first.
"""
