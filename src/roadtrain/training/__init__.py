"""One training run: the step, data, metrics, progress, verify, export, status."""
