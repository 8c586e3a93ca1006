"""State machines of reducers, workers and the coordinator: events in, actions out. The simulator
runs the same state machines (Rule 7: one implementation of every decision)."""
