"""What is left behind: config, training loop, report."""
