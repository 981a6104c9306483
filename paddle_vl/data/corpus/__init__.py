"""Corpora for pretraining: documents in many files, read at any place, mixed and packed. NumPy."""
