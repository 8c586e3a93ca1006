"""Groups and stages: which ranks work together, over which network, and what part of the model each has."""
