"""Lengths of all samples of a dataset, measured once and kept beside its first file.

Text is tokenised and headers of image and video files are read, no pixels: some thousand samples a
second. The file is found again by what the lengths follow from: data files and settings of the
processor. It does not see images that change their size under the same name; a row that becomes too
long by that is refused when it is loaded.
"""

import hashlib
import json
import logging
import os
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

import numpy as np

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.packing import RowBudget, SampleLengths
from paddle_vl.data.worker_pool import WorkerPool

logger = logging.getLogger(__name__)
# Raise when anything changes the length of a sample or what is written.
FORMAT = 1
_REPORT_SECONDS = 10
# Samples that a worker measures at a time.
_PART = 500


class MeasuredSource(Protocol):
    """What is asked of a dataset."""

    on_bad_sample: str
    skipped: Counter[str]
    files: list[Path]

    def __len__(self) -> int: ...

    def lengths(self, number: int) -> tuple[int, int]: ...

    def length_settings(self) -> str: ...

    def place(self, number: int) -> str: ...


def sample_lengths(
    dataset: MeasuredSource, budget: RowBudget, num_workers: int = 0
) -> SampleLengths:
    """Lengths of all samples; where the dataset skips bad ones they get 0 and are counted.

    Args:
        num_workers: processes that measure; 0 measures in this one.

    Raises:
        BadSampleError: a bad sample that is not to be skipped, or one with more vision tokens than
            a row may hold.
    """
    path = _kept_at(dataset)
    kept = _read(path)
    if kept is None:
        kept = _measure(dataset, num_workers)
        _write(path, *kept)
    sizes_N2, skipped = kept
    too_many = sizes_N2[:, 1] > budget.vision_limit
    if too_many.any():
        if dataset.on_bad_sample == "fail":
            raise _too_many(dataset, sizes_N2, int(too_many.argmax()), budget)
        skipped = skipped + Counter(too_many_vision_tokens=int(too_many.sum()))
        sizes_N2 = sizes_N2 * ~too_many[:, None]
    dataset.skipped.update(skipped)
    return SampleLengths(sizes_N2[:, 0], sizes_N2[:, 1])


def _measure(dataset: MeasuredSource, num_workers: int) -> tuple[np.ndarray, Counter[str]]:
    parts = [(at, min(at + _PART, len(dataset))) for at in range(0, len(dataset), _PART)]
    sizes, skipped, reported = [], Counter(), time.monotonic()
    with closing(_measured_parts(dataset, parts, num_workers)) as measured:
        for (_, end), (sizes_N2, part_skipped) in zip(parts, measured, strict=True):
            sizes.append(sizes_N2)
            skipped += part_skipped
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                logger.info("measured the lengths of %d of %d samples", end, len(dataset))
    return np.concatenate(sizes), skipped


def _measured_parts(
    dataset: MeasuredSource, parts: list[tuple[int, int]], num_workers: int
) -> Iterator[tuple[np.ndarray, Counter[str]]]:
    if num_workers == 0 or len(parts) == 1:
        for part in parts:
            yield measure_part(dataset, None, *part)
        return
    pool = WorkerPool(dataset, None, num_workers)
    try:
        for future in [pool.submit(measure_part, *part) for part in parts]:
            yield future.result()
    finally:
        pool.close()


def measure_part(
    dataset: MeasuredSource, collator: None, begin: int, end: int
) -> tuple[np.ndarray, Counter[str]]:
    """Tokens and vision tokens `[N, 2]` of some samples, and what was skipped; run by workers."""
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


def _too_many(
    dataset: MeasuredSource, sizes_N2: np.ndarray, number: int, budget: RowBudget
) -> BadSampleError:
    return BadSampleError(
        "too_many_vision_tokens",
        f"the sample has {sizes_N2[number, 1]} vision tokens and a packed row holds "
        f"{budget.vision_limit}: raise data.max_vision_tokens_per_row, or lower data.max_pixels "
        "(of videos data.video_max_pixels or data.video_fps)",
        dataset.place(number),
    )


def _kept_at(dataset: MeasuredSource) -> Path:
    files = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in dataset.files]
    content = json.dumps([FORMAT, files, dataset.on_bad_sample, dataset.length_settings()])
    first = dataset.files[0]
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return first.with_name(f".{first.name}.lengths-{digest}.npz")


def _read(path: Path) -> tuple[np.ndarray, Counter[str]] | None:
    if not path.is_file():
        return None
    try:
        with np.load(path) as stored:
            return stored["sizes"], Counter(json.loads(str(stored["skipped"])))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise RuntimeError(
            f"{path} is damaged ({error}): delete it, and it is made anew"
        ) from error


def _write(path: Path, sizes_N2: np.ndarray, skipped: Counter[str]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            np.savez_compressed(file, sizes=sizes_N2, skipped=json.dumps(skipped))
        partial.replace(path)
    except OSError as error:
        logger.warning(
            "the lengths of the samples cannot be kept beside the data (%s): every start of this "
            "run measures them again",
            error,
        )
