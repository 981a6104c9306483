"""Conversations in JSONL files, read by line when they are needed.

Opening a dataset reads every line once and checks what costs little: the JSON, the messages, the
tags, that image and video files exist. What needs decoding (broken files, extreme sizes, length)
shows when a sample is taken.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from paddle_vl.data.bad_sample import sample_at
from paddle_vl.data.line_index import (
    MAX_LINE_BYTES,
    LineIndex,
    OnBadSample,
    SamplesOfLines,
)
from paddle_vl.data.media_path import file_size
from paddle_vl.families.qwen3_vl.inputs.conversation import parse_line
from paddle_vl.families.qwen3_vl.inputs.processor import Qwen3VLProcessor
from paddle_vl.families.qwen3_vl.inputs.truncation import truncate_sample
from paddle_vl.families.qwen3_vl.inputs.turns import Conversation


class MessagesDataset(SamplesOfLines):
    """Training or evaluation samples from one or several JSONL files.

    Samples are numbered in file order. Cheap to pickle: it holds positions of lines, not lines.

    Attributes:
        on_bad_sample: "fail" raises at the first bad sample; "skip" leaves out the ones found when
            opening, and lets the loader pass over the ones found later.
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike],
        processor: Qwen3VLProcessor,
        max_length: int | None = None,
        on_bad_sample: OnBadSample = "fail",
        *,
        allow_outside: bool = True,
        max_line_bytes: int = MAX_LINE_BYTES,
    ):
        """Open the files and check every line.

        Args:
            max_length: tokens of a sample at most; longer ones are cut at the right, or bad where
                that would cut an image or video in half or leave nothing to learn. None: no limit.
            allow_outside: whether images and videos may lie outside their data file's folder.
            max_line_bytes: a longer line is a bad sample.

        Raises:
            RuntimeError: a file does not exist.
            BadSampleError: with "fail", the first bad line, as `file:line: reason`.
            ValueError: a file, or with "skip" the whole dataset, has no usable sample.
        """
        self.files = [Path(file) for file in files]
        self.max_length = max_length
        self.on_bad_sample: OnBadSample = on_bad_sample
        self._processor = processor
        self._allow_outside = allow_outside
        self._lines = LineIndex(self.files, self._check_line, on_bad_sample, max_line_bytes)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        """A sample, as `Qwen3VLProcessor.encode_sample` gives it, cut to `max_length`.

        Raises:
            BadSampleError: it cannot be used; as `file:line: reason`.
            RuntimeError: it has a video file and PyAV is not installed.
        """
        return self._encoded(number, self._processor.encode_sample)

    def lengths(self, number: int) -> tuple[int, int]:
        """Tokens of a sample, and how many of them are of images and videos; pixels are not read.

        Raises:
            BadSampleError: it cannot be used, as far as headers of files show it.
        """
        ids = self._encoded(number, self._processor.outline_sample)["input_ids"]
        visual = (self._processor.image_token_id, self._processor.video_token_id)
        return ids.size, int(np.isin(ids, visual).sum())

    def length_settings(self) -> str:
        """What the lengths of samples follow from, beside the files."""
        return json.dumps([self.max_length, self.fingerprint, self._processor.fingerprint()])

    def _encoded(
        self, number: int, encode: Callable[[Conversation], dict[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        line, file_number = self._lines.line(number)
        with sample_at(self.place(number)):
            sample = encode(self._parsed(line, file_number))
            if self.max_length is None:
                return sample
            return truncate_sample(
                sample,
                self.max_length,
                image_token_id=self._processor.image_token_id,
                video_token_id=self._processor.video_token_id,
                merge_size=self._processor.image_processor.merge_size,
            )

    def conversation(self, number: int) -> Conversation:
        """The conversation of a sample; images and videos are paths."""
        line, file_number = self._lines.line(number)
        with sample_at(self.place(number)):
            return self._parsed(line, file_number)

    def _parsed(self, line: bytes, file_number: int) -> Conversation:
        return parse_line(line, self.files[file_number].parent, self._allow_outside)

    def _check_line(self, line: bytes, file_number: int) -> list[int]:
        """Check what is cheap and needs no decoding: the sizes of the files that the line names."""
        conversation = self._parsed(line, file_number)
        conversation.check_targets()
        media = {"image": conversation.images, "video": conversation.videos}
        return [file_size(source, kind) for kind, sources in media.items() for source in sources]
