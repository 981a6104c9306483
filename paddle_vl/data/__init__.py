"""From files to batches: conversations, tokens, pixels, collation and loading.

NumPy only: worker processes run this code and must not load Paddle.
"""
