"""Sums inside the network, on real sockets. docs/concepts/fan-in.md follows the data."""
