"""Checkpoints in HF's layout: safetensors files, sharded or not, read and written as streams."""
