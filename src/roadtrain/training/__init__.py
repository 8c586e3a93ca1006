"""Jobs and runs: the training loop, data, metrics, progress, verify, export, status.

Repeating the command of a run resumes the run at its last committed step. Read `train.py` first.
"""
