"""Fuzzing of every parser: whatever a file holds, the answer is a result or a refusal."""
