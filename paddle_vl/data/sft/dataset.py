"""Conversations in JSONL files, read by line when they are needed.

Opening a dataset reads every line once and checks what costs little: the JSON, the messages, the
tags, that image and video files exist. What needs decoding (broken files, extreme sizes, length)
shows when a sample is taken.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.line_index import LineIndex, OnBadSample
from paddle_vl.data.processor import Qwen3VLProcessor
from paddle_vl.data.sft.conversation import Conversation, parse_line
from paddle_vl.data.sft.truncation import truncate_sample


class MessagesDataset:
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
    ):
        """Open the files and check every line.

        Args:
            max_length: tokens of a sample at most; longer ones are cut at the right, or bad where
                that would cut an image or video in half or leave nothing to learn. None: no limit.

        Raises:
            RuntimeError: a file does not exist.
            BadSampleError: with "fail", the first bad line, as `file:line: reason`.
            ValueError: a file, or with "skip" the whole dataset, has no usable sample.
        """
        self.files = [Path(file) for file in files]
        self.max_length = max_length
        self.on_bad_sample: OnBadSample = on_bad_sample
        self._processor = processor
        self._lines = LineIndex(self.files, self._check_line, on_bad_sample)

    def __len__(self) -> int:
        return len(self._lines)

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
        try:
            sample = encode(self.conversation(number))
            if self.max_length is None:
                return sample
            return truncate_sample(
                sample,
                self.max_length,
                image_token_id=self._processor.image_token_id,
                video_token_id=self._processor.video_token_id,
                merge_size=self._processor.image_processor.merge_size,
            )
        except BadSampleError as error:
            raise error.at(self.place(number)) from error

    def conversation(self, number: int) -> Conversation:
        """The conversation of a sample; images and videos are paths."""
        line, file_number = self._lines.line(number)
        return parse_line(line, self.files[file_number].parent)

    def place(self, number: int) -> str:
        """Where a sample stands: `file:line`."""
        return self._lines.place(number)

    @property
    def fingerprint(self) -> int:
        """Changes when lines are added, removed, or change their length."""
        return self._lines.fingerprint

    @property
    def skipped(self) -> Counter[str]:
        """Kind of fault to the number of samples left out when opening."""
        return self._lines.skipped

    def _check_line(self, line: bytes, file_number: int) -> None:
        _check(parse_line(line, self.files[file_number].parent))


def _check(conversation: Conversation) -> None:
    """Check what is cheap and needs no decoding."""
    if not any(turn.role == "assistant" for turn in conversation.turns):
        raise BadSampleError(
            "no_assistant", "the conversation has no assistant turn, so nothing to learn from"
        )
    for kind, sources in (("image", conversation.images), ("video", conversation.videos)):
        for source in sources:
            if not os.path.isfile(source):
                raise BadSampleError(f"missing_{kind}", f"{kind} file {source} does not exist")
