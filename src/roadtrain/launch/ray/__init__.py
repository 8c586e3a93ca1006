"""Run a launch on a Ray cluster: services as actors, workers with Ray Train. Imports Ray."""
