"""What there is: frozen data and arithmetic. No torch, no sockets, no clock."""
