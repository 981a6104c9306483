"""pi07: a Gemma 3 backbone that sees and reads, and an expert that flows to actions."""
