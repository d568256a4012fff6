"""A training step run the way a config says, then everything put back."""
