"""Fuzzing of every parser: any file must give a result or a refusal."""
