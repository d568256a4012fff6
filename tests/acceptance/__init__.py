"""Acceptance tests: the product as its users meet it, held to what was promised, not to its code."""
