"""Jobs and runs: the training loop, data, metrics, progress, verify, export, status.

A run goes on at its last committed step by the same command. Read `train.py` first.
"""
