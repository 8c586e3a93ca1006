"""Links between two processes beside gloo."""
