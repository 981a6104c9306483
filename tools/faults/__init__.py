"""Faults injected into real training runs, and their outcomes; see `campaign`."""
