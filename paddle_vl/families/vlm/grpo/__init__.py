"""Learning from rewards: answers that a model samples are scored, and the better ones learned."""
