"""Qwen3-VL as static programs, and the runtime of an exported folder."""
