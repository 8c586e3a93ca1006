"""How bytes cross a link."""
