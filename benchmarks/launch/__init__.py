"""Launched runs: from a plan to running processes, and faults that strike them."""
