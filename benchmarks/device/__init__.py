"""Benchmarks of the device path."""
