"""State machines of reducers, workers and the coordinator: events in, actions out (Rule 7)."""
