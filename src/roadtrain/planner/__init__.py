"""Search, report, probe, calibrate."""
