"""From conversations to batches of Qwen3-VL. NumPy only; runs in loader workers."""
