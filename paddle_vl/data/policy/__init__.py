"""Demonstrations of robots: samples, drops, draws, statistics."""
