"""Saving: snapshots, writing, committing and verification of checkpoints."""
