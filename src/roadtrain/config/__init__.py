"""Typed and checked values of the files that users write: jobs, clusters, models and plans.

The values are frozen. The package does not import torch and does not communicate. Read
`job.py` first.
"""
