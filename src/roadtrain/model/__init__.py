"""How a block runs on borrowed parameters."""
