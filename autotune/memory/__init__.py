"""How many bytes a config will need."""
