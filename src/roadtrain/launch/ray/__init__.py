"""Run a launch on a Ray cluster: services and workers in actors. Imports Ray."""
