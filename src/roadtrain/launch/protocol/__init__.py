"""The state machine of a launched run. It gets events and returns actions. It does no I/O, so that
tests and simulations can drive the same code (Rule 7)."""
