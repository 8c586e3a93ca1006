"""The same flow on a virtual clock."""
