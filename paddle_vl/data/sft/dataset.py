"""Conversations in JSONL files, read by line when they are needed.

Opening a dataset reads every line once and checks what costs little: the JSON, the messages, the
tags, that image and video files exist. What needs decoding (broken files, extreme sizes, length)
shows when a sample is taken.
"""

import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.processor import Qwen3VLProcessor
from paddle_vl.data.sft.conversation import Conversation, parse_line
from paddle_vl.data.sft.truncation import truncate_sample

OnBadSample = Literal["fail", "skip"]


class MessagesDataset:
    """Training or evaluation samples from one or several JSONL files.

    Samples are numbered in file order. Cheap to pickle: it holds positions of lines, not lines.

    Attributes:
        on_bad_sample: "fail" raises at the first bad sample; "skip" leaves out the ones found when
            opening, and lets the loader pass over the ones found later.
        skipped: kind of fault to the number of samples left out when opening.
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
        if on_bad_sample not in get_args(OnBadSample):
            raise ValueError(f"on_bad_sample is {on_bad_sample!r}; use 'fail' or 'skip'")
        if not files:
            raise ValueError("no data file given: name at least one JSONL file")
        self.files = [Path(file) for file in files]
        self.max_length = max_length
        self.on_bad_sample: OnBadSample = on_bad_sample
        self.skipped: Counter[str] = Counter()
        self._processor = processor
        self._index_N3 = self._open_files()

    def __len__(self) -> int:
        return len(self._index_N3)

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
        file_number, offset, _ = self._index_N3[number]
        path = self.files[file_number]
        with path.open("rb") as file:
            file.seek(offset)
            return parse_line(file.readline(), path.parent)

    def place(self, number: int) -> str:
        """Where a sample stands: `file:line`."""
        file_number, _, line_number = self._index_N3[number]
        return f"{self.files[file_number]}:{line_number}"

    @property
    def fingerprint(self) -> int:
        """Changes when lines are added, removed, or change their length."""
        return zlib.crc32(self._index_N3.tobytes())

    def _open_files(self) -> np.ndarray:
        """`[N, 3]` int64: file number, byte offset and line number of every usable sample."""
        index: list[tuple[int, int, int]] = []
        bad: list[BadSampleError] = []
        for file_number, path in enumerate(self.files):
            if not path.is_file():
                raise RuntimeError(f"data file {path} does not exist")
            lines = 0
            offset = 0
            with path.open("rb") as file:
                for line_number, line in enumerate(file, start=1):
                    if line.strip():
                        lines += 1
                        try:
                            _check(parse_line(line, path.parent))
                            index.append((file_number, offset, line_number))
                        except BadSampleError as error:
                            bad.append(error.at(f"{path}:{line_number}"))
                    offset += len(line)
            if not lines:
                raise ValueError(f"data file {path} is empty: one JSON object per line is needed")
        if bad and self.on_bad_sample == "fail":
            raise _first_of(bad)
        self.skipped.update(error.kind for error in bad)
        if not index:
            raise ValueError(
                f"all {len(bad)} samples are bad: {dict(self.skipped)}; the first is {bad[0]}"
            )
        return np.array(index, dtype=np.int64)


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


def _first_of(bad: Sequence[BadSampleError]) -> BadSampleError:
    """The first fault, which also tells how many there are."""
    if len(bad) == 1:
        return bad[0]
    first = bad[0]
    more = f" ({len(bad) - 1} more bad samples follow, the next at {bad[1].place}"
    more += "; data.on_bad_sample: skip leaves them out)"
    return BadSampleError(first.kind, first.reason + more, first.place)
