"""Checks of Paddle's collectives on CPU ranks, by subject; each runs on every rank."""
