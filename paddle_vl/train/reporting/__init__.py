"""Metrics of a run, where they are written, and the record of its starts."""
