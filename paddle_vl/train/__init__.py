"""Training: one step, the loop around it, and what it keeps on disk."""
