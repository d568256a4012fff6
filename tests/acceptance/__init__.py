"""Acceptance tests: the product as its users meet it, held to what it promises."""
