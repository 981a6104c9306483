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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.data.checked_lines import CheckedFile, CheckedLines, FileState, state_of
from paddle_vl.data.corpus.cache import Cache
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.keys import unread_keys, unread_note
from paddle_vl.data.formats.reader import RowReader
from paddle_vl.data.jsonl import (
    HOSTILE,
    MAX_LINE_BYTES,
    BadSampleError,
    FileLines,
    LineIndex,
    OnBadSample,
    parse_object,
    sample_at,
)
from paddle_vl.data.media_file import files_of, source_size
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
        return self._lengths_of(self._encoded(number, with_pixels=False))

    def _lengths_of(self, sample: Mapping[str, np.ndarray]) -> tuple[int, int]:
        # Of a pair both.
        ids = np.concatenate([each for key, each in sample.items() if key.endswith("input_ids")])
        own = self._processor
        is_visual = (ids == own.image_token_id) | (ids == own.video_token_id)
        return ids.size, int(np.count_nonzero(is_visual))

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
        limits, conversation = self.limits(self.row_of(number)), self.conversation(number)
        with sample_at(partial(self.place, number)):
            sample = encoded(conversation, *limits, with_pixels)
            is_compared = isinstance(conversation, ComparedConversation)
            return sample | self._reference_of(number) if is_compared else sample


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
        cache: Cache | None = None,
        measures: bool = False,
    ):
        """Open the files and check every line.

        Args:
            max_length: longest sample in tokens, None for no limit; see `truncate_sample`.
            max_line_bytes: a longer line is a bad sample.
            reader: of the rows, in place of one with `allow_outside`.
            cache: where to keep what a file's lines were found to be, so that they are not read
                again; None keeps nothing.
            measures: find `lengths` of the lines while they are read.

        Raises:
            RuntimeError: a file does not exist.
            BadSampleError: with "fail", the first bad line, as `file:line: reason`.
            ValueError: a file is empty, or no sample of all files is usable.
        """
        ConversationData.__init__(self, processor, max_length)
        # Of each file, with the format of its first row.
        reader = reader or RowReader(allow_outside=allow_outside)
        self._readers = [reader] * len(files)
        # Keys that are not read, of each file.
        self._unread: list[dict[str, None]] = [{} for _ in files]
        settings = partial(self._settings_of_checks, reader)
        self._checked = None if cache is None else CheckedLines(cache, settings)
        self._measures = measures
        # Tokens and vision tokens of the first rows of each file, negative where unknown.
        self._measured: list[list[tuple[int, int]]] = [[] for _ in files]
        # States of images and videos, of the file that is being read.
        self._media: dict[str, FileState] = {}
        paths = [*map(Path, files)]
        LineIndex.__init__(
            self, paths, self._check_line, on_bad_sample, max_line_bytes, _MOST_CHECKED
        )
        # Samples do not need them, and workers get a copy of the rest.
        self._checked, self._media = None, {}
        for file, keys in zip(self.files, self._unread, strict=True):
            tell_unread(str(file), keys)

    def _settings_of_checks(self, reader: RowReader) -> list[Any]:
        """What decides on `_check_line` beside the line and the files that it names.

        Args:
            reader: without the format of a first row.
        """
        renderer = self._processor.template.renderer
        # A set has another order in every process.
        tokens = sorted(reader.settings.control_tokens)
        reader = replace(reader, settings=replace(reader.settings, control_tokens=tokens))
        described = None if renderer is None else renderer.description()
        given = [self._max_line_bytes, _MOST_CHECKED]
        return [*given, repr(reader), described, self._processor.fingerprint()]

    def _read_file(self, number: int, *args: Any) -> FileLines:
        self._media.clear()
        if self._checked is None:
            return super()._read_file(number, *args)
        file = self.files[number]
        if (kept := self._checked.of(file)) is not None:
            self._readers[number] = replace(self._readers[number], format=kept.format)
            self._unread[number].update(dict.fromkeys(kept.unread))
            return kept.lines
        before = state_of(file)
        lines = super()._read_file(number, *args)
        format, unread = self._readers[number].format, [*self._unread[number]]
        self._checked.keep(CheckedFile(lines, format, unread), file, before, self._media)
        return lines

    def lengths(self, number: int) -> tuple[int, int]:
        # Without a reference's value a sample is refused, which is not known yet.
        if self._measures and self.reference is None:
            file, at = int(self.positions_N3[number, 0]), number
            at -= int(np.searchsorted(self.positions_N3[:, 0], file))
            if at < len(self._measured[file]) and self._measured[file][at][0] >= 0:
                return self._measured[file][at]
        return super().lengths(number)

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
        for source in [s for each in conversation.branches for s in (*each.images, *each.videos)]:
            for path in files_of(source):
                if path not in self._media:
                    self._media[path] = state_of(path)
        sizes = checked(conversation, self._processor)
        if self._measures:
            self._measured[file_number].append(self._measured_now(conversation))
        return sizes

    def _measured_now(self, conversation: Conversation) -> tuple[int, int]:
        """`lengths` of a conversation; unknown where they are refused, which is told when a run
        asks for them."""
        with suppress(*HOSTILE):
            sample = encoded(conversation, self._processor, self.max_length, with_pixels=False)
            return self._lengths_of(sample)
        return -1, -1


def encoded(
    conversation: Conversation, processor: VLProcessor, longest: int | None, with_pixels: bool
) -> dict[str, np.ndarray]:
    """The sample of a conversation, or the samples of those that are compared.

    Args:
        longest: see `truncate_sample`.
        with_pixels: see `VLProcessor.outline_sample`.

    Raises:
        BadSampleError: it cannot be used.
    """
    if isinstance(conversation, ComparedConversation):
        return encoded_answers(processor, conversation, longest, with_pixels)
    encode = processor.encode_sample if with_pixels else processor.outline_sample
    sample = encode(conversation)
    return sample if longest is None else truncate_sample(sample, longest, processor)


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
