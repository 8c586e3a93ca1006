"""The pure logic of pipeline stages: order of runs, sizes, memory and step times (Rule 7)."""
