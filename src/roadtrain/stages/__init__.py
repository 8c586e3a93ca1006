"""Groups and stages: which processes work together, over which network, on which part of the
model."""
