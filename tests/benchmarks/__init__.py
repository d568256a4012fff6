"""What the product does, measured: each module is a command that prints a table."""
