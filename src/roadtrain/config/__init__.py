"""What the user writes, and arithmetic on it: frozen data. No torch, no sockets, no clock."""
