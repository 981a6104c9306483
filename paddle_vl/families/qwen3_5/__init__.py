"""The Qwen3.5 family, with 3.6 and 3.8: gated DeltaNet layers and gated attention."""
