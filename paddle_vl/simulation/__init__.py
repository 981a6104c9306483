"""Closed loops: environments of simulated robots, and policies that act in them."""
