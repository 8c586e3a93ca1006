"""Fan-in: sums inside the network, on real sockets. docs/concepts/fan-in.md has the data's way."""
