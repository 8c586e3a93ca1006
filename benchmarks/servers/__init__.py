"""Parameter servers with several workers beside FSDP2."""
