"""Lengths of all samples of a dataset, measured once and cached beside its first file.

Measuring tokenizes text and reads only the headers of images and videos, some thousand samples per
second. The cache file's name is a hash of the data files and the processor's settings, and it ends
with a checksum; a damaged one is made again. A change of an image's size under the same name goes
unnoticed; if a packed row is too long then, loading fails.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Protocol

import numpy as np

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.packing import RowBudget, SampleLengths
from paddle_vl.data.samples import SampleSource
from paddle_vl.data.worker_pool import results_in_order
from paddle_vl.files.array_file import read_arrays, write_arrays

logger = logging.getLogger(__name__)
# Increase when the length of a sample or the format of the cache changes.
FORMAT = 2
_REPORT_SECONDS = 10
# Samples that a worker process measures in one job.
_CHUNK = 500


class MeasuredSource(SampleSource, Protocol):
    """A dataset that can be measured."""

    files: list[Path]

    def lengths(self, number: int) -> tuple[int, int]: ...

    def length_settings(self) -> str: ...

    def place(self, number: int) -> str: ...


def sample_lengths(
    dataset: MeasuredSource, budget: RowBudget, num_workers: int = 0
) -> SampleLengths:
    """Lengths of all samples. Skipped bad samples get length 0 and are counted in the dataset.

    Args:
        num_workers: worker processes that measure; 0 measures in this process.

    Raises:
        BadSampleError: where `on_bad_sample` is "fail": a bad sample, or one with more vision
            tokens than a row allows.
    """
    path = _cache_path(dataset)
    cached = _read(path)
    if cached is None:
        cached = _measure(dataset, num_workers)
        _write(path, *cached)
    sizes_N2, skipped = cached
    too_many = sizes_N2[:, 1] > budget.vision_limit
    if too_many.any():
        if dataset.on_bad_sample == "fail":
            number = int(too_many.argmax())
            raise BadSampleError(
                "too_many_vision_tokens",
                f"the sample has {sizes_N2[number, 1]} vision tokens and a packed row holds "
                f"{budget.vision_limit}: raise data.max_vision_tokens_per_row, or lower "
                "data.max_pixels (of videos data.video_max_pixels or data.video_fps)",
                dataset.place(number),
            )
        skipped = skipped + Counter(too_many_vision_tokens=int(too_many.sum()))
        sizes_N2 = sizes_N2 * ~too_many[:, None]
    dataset.skipped.update(skipped)
    return SampleLengths(sizes_N2[:, 0], sizes_N2[:, 1])


def _measure(dataset: MeasuredSource, num_workers: int) -> tuple[np.ndarray, Counter[str]]:
    chunks = [(at, min(at + _CHUNK, len(dataset))) for at in range(0, len(dataset), _CHUNK)]
    sizes, skipped, reported = [], Counter(), time.monotonic()
    workers = num_workers if len(chunks) > 1 else 0
    with closing(results_in_order(measure_chunk, dataset, chunks, workers)) as measured:
        for (_, end), (sizes_N2, chunk_skipped) in zip(chunks, measured, strict=True):
            sizes.append(sizes_N2)
            skipped += chunk_skipped
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                logger.info("measured the lengths of %d of %d samples", end, len(dataset))
    return np.concatenate(sizes), skipped


def measure_chunk(dataset: MeasuredSource, begin: int, end: int) -> tuple[np.ndarray, Counter[str]]:
    """Tokens and vision tokens `[N, 2]` int64 of samples begin to end, and the skipped by kind."""
    sizes_N2 = np.zeros((end - begin, 2), dtype=np.int64)
    skipped: Counter[str] = Counter()
    for number in range(begin, end):
        try:
            sizes_N2[number - begin] = dataset.lengths(number)
        except BadSampleError as error:
            if dataset.on_bad_sample == "fail":
                raise
            skipped[error.kind] += 1
    return sizes_N2, skipped


def _cache_path(dataset: MeasuredSource) -> Path:
    files = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in dataset.files]
    content = json.dumps([FORMAT, files, dataset.on_bad_sample, dataset.length_settings()])
    first = dataset.files[0]
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return first.with_name(f".{first.name}.lengths-{digest}.npz")


def _read(path: Path) -> tuple[np.ndarray, Counter[str]] | None:
    stored = read_arrays(path, "the samples are measured again")
    if stored is None:
        return None
    return stored["sizes"], Counter(json.loads(str(stored["skipped"])))


def _write(path: Path, sizes_N2: np.ndarray, skipped: Counter[str]) -> None:
    try:
        write_arrays(path, sizes=sizes_N2, skipped=json.dumps(skipped))
    except OSError as error:
        logger.warning(
            "the lengths of the samples cannot be cached beside the data (%s): every start of this "
            "run measures them again",
            error,
        )
