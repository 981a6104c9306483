"""Chat with a model: messages, images and videos in, text out."""

from pathlib import Path

from paddle_vl.checkpoint.adapter_files import folder_with
from paddle_vl.families.vlm.answers import Answers
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.model import VLForConditionalGeneration


class Chat(Answers):
    """A model with its processor."""

    def __init__(self, model: VLForConditionalGeneration, processor: VLProcessor):
        self.model = model
        self.processor = processor

    @classmethod
    def from_pretrained(
        cls,
        model_class: type[VLForConditionalGeneration],
        path: str | Path,
        dtype: str = "float32",
        base: str | Path | None = None,
    ) -> "Chat":
        """Load a model folder with its processor files, or an adapter folder and its base.

        Args:
            base: model folder that the adapters belong to; None for the one that their files name.

        Raises:
            ValueError, RuntimeError: the folder is neither.
        """
        return cls(
            model_class.from_pretrained(path, dtype=dtype, base=base),
            VLProcessor.from_pretrained(folder_with("tokenizer.json", Path(path), base)),
        )

    @property
    def tokens(self) -> VLForConditionalGeneration:
        """The model."""
        return self.model

    stream = Answers.answer
