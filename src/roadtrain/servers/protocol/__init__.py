"""What servers and workers decide: events in, actions out (Rule 7)."""
