"""Saving: collecting, writing, committing and verifying checkpoints."""
