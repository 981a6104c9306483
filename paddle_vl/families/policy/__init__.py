"""What robot policies share: observations, normalization, prompts, demonstrations, acting."""
