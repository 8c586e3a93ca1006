"""State machines of switches and of both ends of their streams: events in, actions out. The
simulator runs the same state machine of the fan-in end (Rule 7)."""
