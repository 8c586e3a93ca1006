"""The summation service: CPUs of all machines sum the gradients, and the workers update."""
