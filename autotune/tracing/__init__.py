"""A training step run on tensors that have shapes and no data."""
