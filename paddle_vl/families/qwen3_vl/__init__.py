"""Qwen3-VL: everything particular to it."""
