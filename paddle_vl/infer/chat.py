"""Questions in messages and images, answers as text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paddle_vl.data.processor import Qwen3VLProcessor
from paddle_vl.data.vision.image_file import ImageSource
from paddle_vl.models.qwen3_vl.model import Qwen3VLForConditionalGeneration


class Chat:
    """A model with its processor."""

    def __init__(self, model: Qwen3VLForConditionalGeneration, processor: Qwen3VLProcessor):
        self.model = model
        self.processor = processor

    @classmethod
    def from_pretrained(cls, path: str | Path, dtype: str = "float32") -> "Chat":
        """Load a model folder that holds its processor files too.

        Raises:
            ValueError, RuntimeError: it is not one.
        """
        return cls(
            Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=dtype),
            Qwen3VLProcessor.from_pretrained(path),
        )

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[ImageSource] = (),
        max_new_tokens: int = 128,
    ) -> str:
        """The model's greedy answer to a conversation.

        Args:
            messages: `{"role": ..., "content": ...}`, the last one the user's.
            images: paths, PIL images or uint8 arrays for the `<image>` tags, in order.

        Raises:
            ValueError: a message or image that cannot be used, or tags and images that differ in
                number.
        """
        inputs = self.processor(messages=messages, images=images)
        (new_ids,) = self.model.generate(
            **inputs, max_new_tokens=max_new_tokens, eos_token_ids=self.processor.eos_token_ids
        )
        return self.processor.decode(new_ids).strip()
