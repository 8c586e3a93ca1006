"""Jobs and runs: the training loop, data, metrics, progress, verify, export, status.

The same command resumes a run at its last committed step. Read `train.py` first.
"""
