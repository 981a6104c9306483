"""What a batch is, decided once, on the host, in NumPy. Nothing here imports Paddle."""
