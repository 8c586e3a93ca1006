"""How a block runs on fetched parameters."""
