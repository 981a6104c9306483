"""Comparison of a model with golden tensors computed by its reference implementation."""
