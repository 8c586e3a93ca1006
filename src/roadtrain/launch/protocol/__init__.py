"""What a launched run decides, and its messages: events in, actions out (Rule 7)."""
