"""Parameter servers and their workers: a server turns pushes into pulls by a rule."""
