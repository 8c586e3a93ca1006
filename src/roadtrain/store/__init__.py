"""How bytes rest."""
