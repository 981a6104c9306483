"""Qwen3-VL's processor: tokenizer, image and video processors and chat template, in HF's files.

Shapes: B conversations, L length, P patches, n images or videos.
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.data.media_file import ImageSource
from paddle_vl.data.video_reader import VideoSource
from paddle_vl.families.qwen3_vl.inputs.collate import VISUAL_KEYS, pad_rows
from paddle_vl.families.qwen3_vl.inputs.conversation import Conversation, parse_record
from paddle_vl.families.qwen3_vl.inputs.image_processor import ImageProcessor
from paddle_vl.families.qwen3_vl.inputs.tokenizer import (
    CONTROL_TOKENS,
    END_OF_TEXT,
    IM_END,
    IMAGE_PAD,
    JINJA_TEMPLATE,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    ChatTemplate,
    TextTokenizer,
    VideoPrompt,
)
from paddle_vl.families.qwen3_vl.inputs.video_processor import VideoProcessor
from paddle_vl.files.text_file import parse_json_object, read_text, write_text

Message = Mapping[str, Any]

# Files of a checkpoint that are copied unchanged, for other programs.
_CARRIED_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


class Qwen3VLProcessor:
    """Encodes conversations with images and videos.

    Attributes:
        tokenizer, image_processor, video_processor, template: the components.
        image_token_id, video_token_id, vision_start_token_id, vision_end_token_id, pad_token_id:
            ids of the control tokens, found by name.
        eos_token_ids: ids of `<|im_end|>` and `<|endoftext|>`, which end an answer.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        image_processor: ImageProcessor,
        video_processor: VideoProcessor | None = None,
        carried_files: Mapping[str, str] | None = None,
    ):
        """Combine the components.

        Args:
            video_processor: None for `VideoProcessor.like_images`.
            carried_files: name to text of further files that `save_pretrained` writes unchanged.

        Raises:
            ValueError: the tokenizer lacks a control token.
        """
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.video_processor = video_processor or VideoProcessor.like_images(image_processor)
        self.template = ChatTemplate(tokenizer)
        self._carried_files = dict(carried_files or {})
        ids = self.template.ids
        self.image_token_id = ids[IMAGE_PAD]
        self.video_token_id = ids[VIDEO_PAD]
        self.vision_start_token_id = ids[VISION_START]
        self.vision_end_token_id = ids[VISION_END]
        self.pad_token_id = ids[END_OF_TEXT]
        self.eos_token_ids = [ids[IM_END], ids[END_OF_TEXT]]

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        video_fps: float | None = None,
        video_min_frames: int | None = None,
        video_max_frames: int | None = None,
        video_min_pixels: int | None = None,
        video_max_pixels: int | None = None,
    ) -> "Qwen3VLProcessor":
        """Read the processor files of a checkpoint directory.

        Args:
            min_pixels, max_pixels: override the area of an image; pixels.
            video_fps: overrides the frames sampled per second of video.
            video_min_frames, video_max_frames: override the bounds of sampled frames.
            video_min_pixels, video_max_pixels: override frames x height x width of a video; pixels.

        Raises:
            RuntimeError: `tokenizer.json` or `preprocessor_config.json` is missing or damaged.
            ValueError: a setting is missing or not supported, or a control token is missing.
        """
        directory = Path(directory)
        image_processor = ImageProcessor.from_pretrained(
            directory, min_pixels=min_pixels, max_pixels=max_pixels
        )
        video_processor = VideoProcessor.from_pretrained(
            directory,
            image_processor,
            fps=video_fps,
            min_frames=video_min_frames,
            max_frames=video_max_frames,
            min_pixels=video_min_pixels,
            max_pixels=video_max_pixels,
        )
        carried = {
            name: read_text(directory / name, "a tokenizer's file")
            for name in _CARRIED_FILES
            if (directory / name).is_file()
        }
        _warn_of_other_template(_template_text(carried, directory), directory)
        tokenizer = TextTokenizer.from_file(directory)
        return cls(tokenizer, image_processor, video_processor, carried)

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write the processor under HF's file names.

        Tokenizer files of a checkpoint are written unchanged; those of a new tokenizer generated.
        """
        directory = Path(directory)
        self.tokenizer.save(directory)
        self.image_processor.save_pretrained(directory)
        self.video_processor.save_pretrained(directory)
        files = dict(self._carried_files)
        files.setdefault("tokenizer_config.json", _dump(self._tokenizer_config()))
        files.setdefault("special_tokens_map.json", _dump(_SPECIAL_TOKENS_MAP))
        if _template_text(files, directory) is None:
            files["chat_template.jinja"] = JINJA_TEMPLATE
        for name, text in files.items():
            write_text(directory / name, text)

    def encode_sample(self, conversation: Conversation) -> dict[str, np.ndarray]:
        """One training sample.

        Returns:
            input_ids and labels `[L]` int64 (labels not shifted, -100 outside targets); with
            images, pixel_values `[P, 1536]` float32 and image_grid_thw `[n, 3]` int64; with videos,
            pixel_values_videos and video_grid_thw likewise.

        Raises:
            BadSampleError: an image or video cannot be used, or text contains a special token.
            RuntimeError: there is a video file and PyAV is not installed.
        """
        return self._encode(conversation, add_generation_prompt=False)

    def outline_sample(self, conversation: Conversation) -> dict[str, np.ndarray]:
        """A training sample from the headers of its images and videos, to measure its length.

        Pixels are broadcast zeros. Height and width may be exchanged in a grid. Errors are those of
        `encode_sample` that headers show.
        """
        return self._encode(conversation, add_generation_prompt=False, with_pixels=False)

    def encode_prompts(
        self, conversations: Sequence[Conversation], *, add_generation_prompt: bool = True
    ) -> dict[str, np.ndarray]:
        """A left-padded batch for generation.

        Returns:
            input_ids and attention_mask `[B, L]` int64; with images or videos, the pixels and
            grids of all of them, in order. Errors are those of `encode_sample`.
        """
        if not conversations:
            raise ValueError("no conversation given: at least one is needed")
        samples = [
            self._encode(conversation, add_generation_prompt=add_generation_prompt)
            for conversation in conversations
        ]
        rows = [sample["input_ids"] for sample in samples]
        length = max(len(row) for row in rows)
        batch = {
            "input_ids": pad_rows(rows, length, self.pad_token_id, "left"),
            "attention_mask": pad_rows([np.ones_like(row) for row in rows], length, 0, "left"),
        }
        for key in VISUAL_KEYS:
            arrays = [sample[key] for sample in samples if key in sample]
            if arrays:
                batch[key] = np.concatenate(arrays)
        return batch

    def __call__(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        images: Sequence[ImageSource] | Sequence[Sequence[ImageSource]] | None = None,
        videos: Sequence[VideoSource] | Sequence[Sequence[VideoSource]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> dict[str, np.ndarray]:
        """Messages, images and videos to a left-padded batch for generation.

        Args:
            messages: one conversation (a list of messages) or several (a list of lists).
            images: paths, PIL images or uint8 arrays for `<image>` tags and image parts without a
                source, in order; for several conversations a list of lists.
            videos: the same for videos: paths, `VideoFrames` or uint8 arrays of frames.

        Returns:
            As `encode_prompts`.

        Raises:
            BadSampleError: as for training records.
        """
        batch: Sequence[Any] = messages
        media: dict[str, Any] = {"images": images, "videos": videos}
        if messages and isinstance(messages[0], Mapping):
            batch, media = [messages], {name: [own or ()] for name, own in media.items()}
        for name, lists in media.items():
            media[name] = lists = [()] * len(batch) if lists is None else lists
            if len(lists) != len(batch):
                raise ValueError(
                    f"{len(batch)} conversations but {len(lists)} lists of {name}: give one list "
                    "per conversation (empty where it has none)"
                )
        conversations = [
            parse_record({"messages": each, "images": list(own or ()), "videos": list(clips or ())})
            for each, own, clips in zip(batch, *media.values(), strict=True)
        ]
        return self.encode_prompts(conversations, add_generation_prompt=add_generation_prompt)

    def fingerprint(self) -> str:
        """Hash of the tokenizer and of the settings of the image and video processors."""
        settings = [self.image_processor.to_dict(), self.video_processor.to_dict()]
        content = self.tokenizer.to_json() + json.dumps(settings, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of one row of ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def _encode(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool,
        with_pixels: bool = True,
    ) -> dict[str, np.ndarray]:
        visual: dict[str, np.ndarray] = {}
        num_image_tokens: Sequence[int] = ()
        if conversation.images:
            if with_pixels:
                visual = self.image_processor(conversation.images)
            else:
                grids = self.image_processor.grids(conversation.images)
                visual = {"image_grid_thw": grids, "pixel_values": _no_pixels(grids)}
            num_image_tokens = self.image_processor.num_tokens(visual["image_grid_thw"]).tolist()
        video_prompts: list[VideoPrompt] = []
        if conversation.videos:
            if with_pixels:
                arrays, timestamps = self.video_processor(conversation.videos)
            else:
                grids, timestamps = self.video_processor.grids(conversation.videos)
                arrays = {"video_grid_thw": grids, "pixel_values_videos": _no_pixels(grids)}
            counts = self.video_processor.tokens_per_patch(arrays["video_grid_thw"]).tolist()
            video_prompts = [VideoPrompt(*each) for each in zip(timestamps, counts, strict=True)]
            visual.update(arrays)
        chat = self.template.encode(
            conversation,
            num_image_tokens,
            video_prompts,
            add_generation_prompt=add_generation_prompt,
        )
        return {
            "input_ids": np.array(chat.input_ids, dtype=np.int64),
            "labels": np.array(chat.labels, dtype=np.int64),
            **visual,
        }

    def _tokenizer_config(self) -> dict[str, Any]:
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        return {
            "tokenizer_class": "Qwen2Tokenizer",
            "processor_class": "Qwen3VLProcessor",
            "added_tokens_decoder": {
                str(token_id): {"content": token, **flags, "special": True}
                for token_id, token in self.tokenizer.special_tokens.items()
            },
            "add_prefix_space": False,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "split_special_tokens": False,
            "unk_token": None,
            **_SPECIAL_TOKENS_MAP,
        }


_SPECIAL_TOKENS_MAP = {
    "additional_special_tokens": [token for token in CONTROL_TOKENS if token != END_OF_TEXT],
    "eos_token": IM_END,
    "pad_token": END_OF_TEXT,
}


def _no_pixels(grid_thw: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.float32(0), (int(grid_thw.prod(axis=1).sum()), 1))


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _template_text(files: Mapping[str, str], directory: Path) -> str | None:
    """The Jinja template, from whichever of HF's files has it."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"]
    for name in ("chat_template.json", "tokenizer_config.json"):
        what, remedy = "a tokenizer's settings", "fetch or save it again"
        values = parse_json_object(files.get(name, "{}"), directory / name, what, remedy)
        text = values.get("chat_template")
        if text:
            return str(text)
    return None


def _warn_of_other_template(text: str | None, directory: Path) -> None:
    """Warn if the checkpoint's own template is known to differ from this one."""
    differences = []
    if text and re.search(r"add_generation_prompt[^#]*assistant\\n<think>", text):
        differences.append("opens every answer with <think>")
    if text and "You are a helpful assistant" in text:
        differences.append("adds a default system message")
    if differences:
        warnings.warn(
            f"the chat template in {directory} {' and '.join(differences)}; paddle_vl uses "
            "Qwen3-VL's plain template, which does not: write this into your messages if the model "
            "needs it",
            stacklevel=3,
        )
