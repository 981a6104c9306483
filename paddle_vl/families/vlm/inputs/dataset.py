"""Dataset of conversations in JSONL files.

Opening it reads every line once and checks the JSON, the messages, the tags, and that image and
video files exist. Faults that need decoding (broken files, extreme sizes, length) show when a
sample is loaded.
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from paddle_vl.data.formats.keys import unread_keys, unread_note
from paddle_vl.data.jsonl import (
    MAX_LINE_BYTES,
    BadSampleError,
    LineIndex,
    OnBadSample,
    sample_at,
)
from paddle_vl.data.media_file import file_size
from paddle_vl.data.worker_pool import first_time
from paddle_vl.families.vlm.inputs.collate import IGNORED_LABEL
from paddle_vl.families.vlm.inputs.conversation import Conversation, parse_line
from paddle_vl.families.vlm.inputs.processor import VLProcessor

logger = logging.getLogger(__name__)


class MessagesDataset(LineIndex):
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
    ):
        """Open the files and check every line.

        Args:
            max_length: longest sample in tokens, None for no limit; see `truncate_sample`.
            allow_outside: whether images and videos may lie outside their data file's folder.
            max_line_bytes: a longer line is a bad sample.

        Raises:
            RuntimeError: a file does not exist.
            BadSampleError: with "fail", the first bad line, as `file:line: reason`.
            ValueError: a file is empty, or no sample of all files is usable.
        """
        self.max_length = max_length
        self._processor = processor
        self._allow_outside = allow_outside
        # Keys that are not read, of each file.
        self._unread: list[dict[str, None]] = [{} for _ in files]
        super().__init__([*map(Path, files)], self._check_line, on_bad_sample, max_line_bytes)
        for file, keys in zip(self.files, self._unread, strict=True):
            if (note := unread_note(keys)) and first_time(str(file)):
                logger.warning("%s: %s", file, note)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        """A sample of `VLProcessor.encode_sample`, truncated to `max_length`.

        Raises:
            BadSampleError: the sample cannot be used, as `file:line: reason`.
            RuntimeError: it has a video file and PyAV is not installed.
        """
        return self._encoded(number, self._processor.encode_sample)

    def lengths(self, number: int) -> tuple[int, int]:
        """Tokens and vision tokens of a sample; headers of images and videos are read, no pixels.

        Raises:
            BadSampleError: the sample cannot be used, as far as headers show it.
        """
        ids = self._encoded(number, self._processor.outline_sample)["input_ids"]
        visual = (self._processor.image_token_id, self._processor.video_token_id)
        return ids.size, int(np.isin(ids, visual).sum())

    def length_settings(self) -> str:
        """The settings that affect the lengths of samples, as JSON."""
        return json.dumps([self.max_length, self.fingerprint, self._processor.fingerprint()])

    def _encoded(
        self, number: int, encode: Callable[[Conversation], dict[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        line, file_number = self.line(number)
        with sample_at(self.place(number)):
            sample = encode(self._parsed(line, file_number))
            if self.max_length is None:
                return sample
            return truncate_sample(sample, self.max_length, self._processor)

    def conversation(self, number: int) -> Conversation:
        """The conversation of a sample, with paths of images and videos."""
        line, file_number = self.line(number)
        with sample_at(self.place(number)):
            return self._parsed(line, file_number)

    def _parsed(self, line: bytes, file_number: int) -> Conversation:
        return parse_line(line, self.files[file_number].parent, self._allow_outside)

    def _check_line(self, line: bytes, file_number: int) -> list[int]:
        """Check a line without decoding media; sizes in bytes of the files that it names."""
        conversation = self._parsed(line, file_number)
        conversation.check_targets()
        self._unread[file_number].update(dict.fromkeys(unread_keys(conversation.extra)))
        media = {"image": conversation.images, "video": conversation.videos}
        return [file_size(source, kind) for kind, sources in media.items() for source in sources]


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
    if not (labels[1:] != IGNORED_LABEL).any():
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
