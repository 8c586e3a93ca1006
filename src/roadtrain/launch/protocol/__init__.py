"""The state machine of a launched run: events in, actions out (Rule 7)."""
