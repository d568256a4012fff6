"""Which config next, and which is best."""
