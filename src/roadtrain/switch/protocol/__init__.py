"""State machines of switches and of both ends of their streams: events in, actions out (Rule 7)."""
