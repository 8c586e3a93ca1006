"""The state machine of a launched run. It takes events and returns actions (Rule 7)."""
