"""What a switch and the two ends of its streams decide: events in, actions out (Rule 7)."""
