"""The Qwen4-Exp family: residual streams, hashed n-grams, attention to chosen blocks."""
