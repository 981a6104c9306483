"""Text answers to messages with images and videos, of a model or of its exported programs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paddle_vl.checkpoint.adapter_files import folder_with
from paddle_vl.config.families import FamilyEntry
from paddle_vl.data.media_file import ImageSource
from paddle_vl.data.video_reader import VideoSource
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.generation.config import GenerationConfig
from paddle_vl.generation.text_pieces import text_pieces


class Answers:
    """Base of what answers conversations.

    Attributes:
        processor: encodes the conversation and decodes the answer.
        tokens: chooses the tokens: a model or what has its `generation_config` and `stream`.
        more: further arguments of its `stream`.
    """

    processor: VLProcessor
    tokens: Any
    more: Mapping[str, Any] = {}

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
        steps = self.tokens.stream(**batch, generation_config=config, **self.more)
        ids = (int(token_id) for (token_id,) in steps)
        return text_pieces(ids, self.processor.decode, messages[-1]["role"] == "assistant")


class Chat(Answers):
    """A model with its processor."""

    def __init__(self, model: Any, processor: VLProcessor):
        self.model = self.tokens = model
        self.processor = processor

    stream = Answers.answer


def open_chat(
    family: FamilyEntry,
    folder: Path,
    base: str | Path | None,
    template_variables: Mapping[str, Any],
    dtype: str = "float32",
) -> Chat:
    """A model folder with its processor files, or an adapter folder and its base.

    Args:
        base: model folder that the adapters belong to; None for the one that their files name.
        template_variables: see `VLProcessor.from_pretrained`.

    Raises:
        ValueError, RuntimeError: the folder is neither, or its files are of several models.
    """
    # Programs of an export answer without the model's code.
    from paddle_vl.families.vlm.folders.processor_fit import check_processor_fits

    model_class = family.model_class()
    processor = VLProcessor.from_pretrained(
        folder_with("tokenizer.json", folder, base),
        template_variables=template_variables,
        earlier_reasoning="drop",
        model_type=model_class.model_type,
    )
    model = model_class.from_pretrained(folder, dtype=dtype, base=base)
    check_processor_fits(model.config, processor)
    chat = Chat(model, processor)
    chat.more = {"kept": []}
    return chat
