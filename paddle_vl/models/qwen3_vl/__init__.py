"""Qwen3-VL: a vision tower with deepstack levels into a Qwen3 decoder."""
