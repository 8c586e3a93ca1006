"""Run a launch on a Ray cluster, with services as actors and workers in Ray Train. Imports Ray."""
