"""Answers: token by token, for batches of different lengths, in chat and in the engine."""
