"""Pipelines over two clusters in the lab, beside torch's parallelisms."""
