"""Faults that are injected into real training runs, and what becomes of these; see `campaign`."""
