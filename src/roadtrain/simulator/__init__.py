"""The same state machines on a virtual clock."""
