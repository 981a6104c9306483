"""Checks of Paddle's collectives on CPU processes, by subject; each runs on every rank."""
