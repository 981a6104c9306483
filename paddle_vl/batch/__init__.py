"""Content and layout of batches, computed on the host in NumPy. Nothing here imports Paddle."""
