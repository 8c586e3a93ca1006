"""The state machine of a relay: events in, actions out (Rule 7)."""
