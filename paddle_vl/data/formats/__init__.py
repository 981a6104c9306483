"""Rows of other trainers, brought to one canonical form; pure Python, without a tokenizer."""
