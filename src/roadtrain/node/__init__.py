"""The flow on real machines: the only room with threads."""
