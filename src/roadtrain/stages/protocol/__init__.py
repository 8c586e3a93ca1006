"""The pure logic of pipeline stages: the order of runs, sizes, memory and step times (Rule 7)."""
