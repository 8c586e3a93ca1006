"""The pure logic of pipeline stages (Rule 7): the order of forwards and backwards, the sizes of
stages, memory and step times."""
