"""Batches on their way into a training step."""
