"""The state machine of a relay: events in, actions out. The simulator runs the same code (Rule
7)."""
