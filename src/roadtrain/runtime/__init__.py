"""The state machines on real machines: the only room with threads."""
