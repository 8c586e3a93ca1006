"""Typed, checked and frozen values of the files that users write: jobs, clusters, models and plans.

Does not import torch and does not communicate. Read `job.py` first.
"""
