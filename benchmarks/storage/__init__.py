"""Stores and devices: updates next to the files that hold the state."""
