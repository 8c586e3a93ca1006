"""What a relay decides: events in, actions out (Rule 7)."""
