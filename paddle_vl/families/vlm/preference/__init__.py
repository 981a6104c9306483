"""Preference training of vision-language models: an objective over log-probabilities of answers."""
