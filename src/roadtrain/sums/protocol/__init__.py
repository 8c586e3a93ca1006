"""State machines of reducers, workers and the coordinator: events in, actions out. The simulator
runs the same reducers and the same changes of spare hosts (Rule 7)."""
