"""STAND-IN: `src/paddlefleet/models/gpt/__init__.py` exports the model."""

from paddlefleet.models.gpt.gpt_model import GPTModel

__all__ = ["GPTModel"]
