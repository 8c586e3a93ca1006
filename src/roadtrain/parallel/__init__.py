"""Groups and stages: who works together, over which network, on which part of the model."""
