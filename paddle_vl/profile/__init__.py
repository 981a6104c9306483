"""Profiles of training steps: time by phase, memory by rank, and choices that fit a machine."""
