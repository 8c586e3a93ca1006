"""What reducers, their members and the coordinator decide: events in, actions out (Rule 7)."""
