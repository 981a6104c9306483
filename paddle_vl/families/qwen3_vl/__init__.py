"""The Qwen3-VL family."""
