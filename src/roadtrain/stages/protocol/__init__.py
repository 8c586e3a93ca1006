"""What stages decide, and the arithmetic of their sizes, memory and traffic (Rule 7)."""
