"""Each peer beside us. Only here are peers imported."""
