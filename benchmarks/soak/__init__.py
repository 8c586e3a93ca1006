"""Random faults that strike servers, workers and stores, and checks of what is left."""
