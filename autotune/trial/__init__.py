"""One launch of a config, in this process or in its own."""
