"""Inputs of PaddleOCR-VL: its image processor, tokens, chat templates and task prompts."""
