"""Simulation of one rank of many, for `tools/simulate_scale.py`."""
