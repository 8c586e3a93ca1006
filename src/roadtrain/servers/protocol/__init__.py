"""The state machines of servers and workers: events in, actions out (Rule 7)."""
