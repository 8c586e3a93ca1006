"""The pure logic of pipeline stages: the order of forwards and backwards, the sizes of stages,
memory and step times. The simulator uses the same code (Rule 7)."""
