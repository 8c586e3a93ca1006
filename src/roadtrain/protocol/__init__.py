"""What should happen: events in, actions out. No torch, sockets, threads or clock (Rule 7)."""
