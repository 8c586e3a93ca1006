"""The state machine of a launched run. The state machine gets events and returns actions
(Rule 7)."""
