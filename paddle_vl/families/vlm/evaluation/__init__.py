"""Scores of answers: metrics, data files and suites of them."""
