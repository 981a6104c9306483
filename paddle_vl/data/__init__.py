"""Data loading for all families: JSONL files, images, videos, packing, loader and workers.

NumPy only: worker processes run this code and must not load Paddle.
"""
