"""Chat with a model: messages, images and videos in, text out."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paddle_vl.checkpoint.adapter_files import folder_with
from paddle_vl.data.media_file import ImageSource
from paddle_vl.data.video_reader import VideoSource
from paddle_vl.families.vlm.answers import answer_pieces
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.model import VLForConditionalGeneration


class Chat:
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

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[ImageSource] = (),
        videos: Sequence[VideoSource] = (),
        **settings: Any,
    ) -> str:
        """The model's answer to a conversation. Arguments as for `stream`."""
        return "".join(self.stream(messages, images, videos, **settings))

    def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[ImageSource] = (),
        videos: Sequence[VideoSource] = (),
        **settings: Any,
    ) -> Iterator[str]:
        """The model's answer in pieces; arguments and errors as of `answer_pieces`."""
        return answer_pieces(self.model, self.processor, messages, images, videos, **settings)
