"""Rows of conversations in files of any kind, and the mixtures that training draws from them."""
