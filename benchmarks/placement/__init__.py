"""Whole training runs on one machine, beside plain torch and DeepSpeed."""
