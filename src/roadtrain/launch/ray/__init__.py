"""A launched run on a Ray cluster: services are actors, workers are Ray Train's. Imports Ray."""
