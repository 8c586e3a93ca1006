"""Sums inside the network: the lab with switches, and models of the fan-in's machines."""
