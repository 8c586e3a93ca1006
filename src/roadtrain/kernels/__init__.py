"""How numbers change: flat arrays in, flat arrays out, no I/O. Every kernel has a plain
reference."""
