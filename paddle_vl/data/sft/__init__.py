"""Supervised fine-tuning: conversations, the chat template, the dataset over JSONL files."""
