"""The simulator and the planner beside published and measured runs."""
