"""Datasets of conversations, and that of JSONL files.

Opening those reads every line once and checks its format, the messages, the tags, and that image
and video files exist; of a very long file the first lines, so that a million start in seconds.
Faults that need decoding (broken files, extreme sizes, length) show when a sample is loaded.
"""

import json
import logging
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.keys import unread_keys, unread_note
from paddle_vl.data.formats.reader import RowReader
from paddle_vl.data.jsonl import (
    MAX_LINE_BYTES,
    BadSampleError,
    LineIndex,
    OnBadSample,
    parse_object,
    sample_at,
)
from paddle_vl.data.media_file import source_size
from paddle_vl.data.worker_pool import warn_once
from paddle_vl.families.vlm.inputs.preference import (
    REFERENCE,
    ComparedConversation,
    encoded_answers,
)
from paddle_vl.families.vlm.inputs.processor import VLProcessor

logger = logging.getLogger(__name__)
# Lines of a file that are checked when it is opened: some seconds.
_MOST_CHECKED = 20_000


class ConversationData(ABC):
    """Samples of conversations, numbered in the order of the rows.

    Attributes:
        max_length: longest sample in tokens, None for no limit; see `truncate_sample`.
        limit: number of samples, the first ones; None for all.
        source_names: names of the sources whose training losses are reported, none or several; a
            sample then has the number of its `source`, a scalar.
    """

    files: list[Path]
    max_length: int | None
    on_bad_sample: OnBadSample
    skipped: Counter[str]
    fingerprint: int
    source_names: Sequence[str] = ()

    def __init__(self, processor: VLProcessor, max_length: int | None):
        self.max_length, self._processor = max_length, processor
        self.limit: int | None = None
        self._samples: np.ndarray | None = None
        self._split: Callable[[Any], Sequence[Conversation]] = processor.template.split
        # Of each sample of answers, `[N, 2]` or `[N, 1]`; None without a precomputed reference.
        self.reference: np.ndarray | None = None

    @abstractmethod
    def row_count(self) -> int:
        """Number of rows."""

    @abstractmethod
    def row(self, number: int) -> Conversation:
        """The conversation of a row.

        Raises:
            BadSampleError: the row cannot be used, with its place.
        """

    @abstractmethod
    def row_place(self, number: int) -> str:
        """Location of a row: `file:line` or the like."""

    def limits(self, number: int) -> tuple[VLProcessor, int | None]:
        """The processor and the longest sample for a row."""
        return self._processor, self.max_length

    def metrics(self, number: int) -> Sequence[str]:
        """Metrics of the answers to a row; empty for those of all data."""
        return ()

    def source_name(self, number: int) -> str | None:
        """The name that a row's source was given, if it was."""
        return None

    def row_of(self, number: int) -> int:
        """The row of a sample."""
        return number if self._samples is None else int(self._samples[number, 0])

    def __len__(self) -> int:
        count = self.row_count() if self._samples is None else len(self._samples)
        return count if self.limit is None else min(count, self.limit)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        """A sample of `VLProcessor.encode_sample`, truncated to `max_length`.

        Raises:
            BadSampleError: the sample cannot be used, as `file:line: reason`.
            RuntimeError: it has a video file and PyAV is not installed.
        """
        return self._encoded(number)

    def lengths(self, number: int) -> tuple[int, int]:
        """Tokens and vision tokens of a sample; headers of images and videos are read, no pixels.

        Raises:
            BadSampleError: the sample cannot be used, as far as headers show it.
        """
        sample = self._encoded(number, with_pixels=False)
        # Of a pair both.
        ids = np.concatenate([each for key, each in sample.items() if key.endswith("input_ids")])
        visual = (self._processor.image_token_id, self._processor.video_token_id)
        return ids.size, int(np.isin(ids, visual).sum())

    def length_settings(self) -> str:
        """The settings that affect the lengths of samples, as JSON."""
        return json.dumps([self.max_length, self.fingerprint, self._processor.fingerprint()])

    def conversation(self, number: int) -> Conversation:
        """The conversation of a sample, with paths of images and videos."""
        if self._samples is None:
            return self.row(number)
        row, answer = self._samples[number]
        return self._split(self.row(row))[answer]

    def place(self, number: int) -> str:
        """Location of a sample: `file:line` or the like."""
        return self.row_place(self.row_of(number))

    def _reference_of(self, number: int) -> dict[str, np.ndarray]:
        if self.reference is None:
            return {}
        values = self.reference[number]
        if np.isnan(values).any():
            raise BadSampleError(
                "no_reference",
                "the sample was bad when the reference's log-probabilities were computed: run "
                "paddle-vl precompute-reference again",
            )
        return {REFERENCE: values}

    def split_rows(self, split: Callable[[Any], Sequence[Conversation]] | None = None) -> None:
        """Make several samples of each row, default: one of each learned answer; reads all rows."""
        self._split = split or self._split
        samples = []
        for row in range(self.row_count()):
            samples += [(row, each) for each in range(len(self._split(self.row(row))))]
        self._samples = np.array(samples, dtype=np.int64)

    def _encoded(self, number: int, with_pixels: bool = True) -> dict[str, np.ndarray]:
        processor, longest = self.limits(self.row_of(number))
        conversation = self.conversation(number)
        with sample_at(partial(self.place, number)):
            if isinstance(conversation, ComparedConversation):
                sample = encoded_answers(processor, conversation, longest, with_pixels)
                return sample | self._reference_of(number)
            if with_pixels:
                sample = processor.encode_sample(conversation)
            else:
                sample = processor.outline_sample(conversation)
            return sample if longest is None else truncate_sample(sample, longest, processor)


class MessagesDataset(ConversationData, LineIndex):
    """Samples of one or several JSONL files, numbered in file order.

    Attributes:
        on_bad_sample: "fail" raises at the first bad sample; "skip" leaves out those found when
            opening, and lets the loader skip those found later.
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike],
        processor: VLProcessor,
        max_length: int | None = None,
        on_bad_sample: OnBadSample = "fail",
        *,
        allow_outside: bool = True,
        max_line_bytes: int = MAX_LINE_BYTES,
        reader: RowReader | None = None,
    ):
        """Open the files and check every line.

        Args:
            max_length: longest sample in tokens, None for no limit; see `truncate_sample`.
            max_line_bytes: a longer line is a bad sample.
            reader: of the rows, in place of one with `allow_outside`.

        Raises:
            RuntimeError: a file does not exist.
            BadSampleError: with "fail", the first bad line, as `file:line: reason`.
            ValueError: a file is empty, or no sample of all files is usable.
        """
        ConversationData.__init__(self, processor, max_length)
        # Of each file, with the format of its first row.
        self._readers = [reader or RowReader(allow_outside=allow_outside) for _ in files]
        # Keys that are not read, of each file.
        self._unread: list[dict[str, None]] = [{} for _ in files]
        paths = [*map(Path, files)]
        LineIndex.__init__(
            self, paths, self._check_line, on_bad_sample, max_line_bytes, _MOST_CHECKED
        )
        for file, keys in zip(self.files, self._unread, strict=True):
            tell_unread(str(file), keys)

    def row_count(self) -> int:
        return len(self.positions_N3)

    def row(self, number: int) -> Conversation:
        line, file_number = self.line(number)
        with sample_at(self.row_place(number)):
            return self._parsed(line, file_number)

    def row_place(self, number: int) -> str:
        return LineIndex.place(self, number)

    def _parsed(self, line: bytes, file_number: int) -> Conversation:
        folder = self.files[file_number].parent
        return self._readers[file_number](parse_object(line, "a row"), folder)

    def _check_line(self, line: bytes, file_number: int) -> list[int]:
        """Check a line without decoding media; sizes in bytes of the files that it names."""
        conversation = self._parsed(line, file_number)
        reader = self._readers[file_number]
        if reader.format is None:
            self._readers[file_number] = replace(reader, format=conversation.format)
        self._unread[file_number].update(dict.fromkeys(unread_keys(conversation.extras)))
        return checked(conversation, self._processor)


def checked(conversation: Conversation, processor: VLProcessor) -> list[int]:
    """Check a conversation without decoding media; sizes in bytes of the files that it names.

    Raises:
        BadSampleError: no target, nothing that renders it, or a file that does not exist.
    """
    sizes = []
    for each in conversation.branches:
        each.check_targets()
        processor.template.check(each)
        media = {"image": each.images, "video": each.videos}
        sizes += [source_size(source, kind) for kind, of in media.items() for source in of]
    return sizes


def tell_unread(name: str, keys: dict[str, None]) -> None:
    """Warn, once, of the keys of a source that are not read."""
    if note := unread_note(keys):
        warn_once(logger, name, f"{name}: {note}")


def truncate_sample(
    sample: dict[str, np.ndarray], max_length: int, processor: VLProcessor
) -> dict[str, np.ndarray]:
    """The processor's sample cut at the right to `max_length` tokens, without pixels of media cut
    off.

    Raises:
        BadSampleError: the cut goes through an image or a video, or leaves no target.
    """
    length = len(sample["input_ids"])
    if length <= max_length:
        return sample
    ids, labels = sample["input_ids"][:max_length], sample["labels"][:max_length]
    if not (labels[1:] != IGNORE_INDEX).any():
        raise _too_long(length, max_length, "would remove every target token")
    cut = {**sample, "input_ids": ids, "labels": labels}
    for kind, token_id, pixels, grid in (
        ("image", processor.image_token_id, "pixel_values", "image_grid_thw"),
        ("video", processor.video_token_id, "pixel_values_videos", "video_grid_thw"),
    ):
        if grid not in sample:
            continue
        grid_thw = sample[grid]
        ends = processor.image_processor.num_tokens(grid_thw).cumsum()
        kept_tokens = np.count_nonzero(ids == token_id)
        num_kept = int(np.searchsorted(ends, kept_tokens, side="right"))
        if kept_tokens not in (0, *ends):
            raise _too_long(length, max_length, f"would cut {kind} {num_kept + 1} in half")
        del cut[pixels], cut[grid]
        if num_kept:
            cut[grid] = grid_thw[:num_kept]
            cut[pixels] = sample[pixels][: int(cut[grid].prod(axis=1).sum())]
    return cut


def _too_long(length: int, max_length: int, harm: str) -> BadSampleError:
    return BadSampleError(
        "too_long",
        f"the sample has {length} tokens and data.max_length is {max_length}: truncating it "
        f"{harm}; raise data.max_length, lower data.max_pixels (for videos data.video_max_pixels "
        "or data.video_fps), or shorten the sample",
    )
