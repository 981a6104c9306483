"""Robot demonstrations: files, samples, statistics. NumPy only; runs in loader workers."""
