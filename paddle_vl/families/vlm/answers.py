"""Text answers to messages with images and videos, of the model or of its exported programs."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from paddle_vl.data.media_file import ImageSource
from paddle_vl.data.video_reader import VideoSource
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.generation.config import GenerationConfig
from paddle_vl.generation.text_pieces import text_pieces


class TokenStream(Protocol):
    """What chooses the tokens.

    Attributes:
        generation_config: its own settings; None for the defaults.
    """

    generation_config: GenerationConfig | None

    def stream(self, *args: Any, **batch: Any) -> Iterator[np.ndarray]:
        """`[B]` ids per step, see `Qwen3VLForConditionalGeneration.stream`."""
        ...


class Answers(ABC):
    """Base of what answers conversations.

    Attributes:
        processor: encodes the conversation and decodes the answer.
    """

    processor: VLProcessor

    @property
    @abstractmethod
    def tokens(self) -> TokenStream:
        """What chooses the tokens."""

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[ImageSource] = (),
        videos: Sequence[VideoSource] = (),
        **settings: Any,
    ) -> str:
        """The answer to a conversation; arguments as of `answer`."""
        return "".join(self.answer(messages, images, videos, **settings))

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[ImageSource] = (),
        videos: Sequence[VideoSource] = (),
        **settings: Any,
    ) -> Iterator[str]:
        """The answer in pieces of complete characters, see `text_pieces`.

        Args:
            messages: `{"role": ..., "content": ...}`, the last one the user's, or the beginning of
                an answer, of which the pieces are the rest.
            images: paths, PIL images or uint8 arrays for the `<image>` tags, in order.
            videos: paths, `VideoFrames` or uint8 arrays of frames for the `<video>` tags.
            settings: of `GenerationConfig`, overriding the model's own; where neither has
                `eos_token_id`, the processor's are used.

        Raises:
            ValueError: an unusable message, image or video, a number of tags that differs from
                that of images or videos, or a bad setting.
            RuntimeError: a video file without PyAV installed.
        """
        config = (self.tokens.generation_config or GenerationConfig()).updated(**settings)
        config = config.with_ends_of(self.processor.generation_config)
        batch = self.processor(messages=messages, images=images, videos=videos)
        steps = self.tokens.stream(**batch, generation_config=config)
        ids = (int(token_id) for (token_id,) in steps)
        return text_pieces(ids, self.processor.decode, messages[-1]["role"] == "assistant")
