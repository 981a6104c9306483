"""Data files by their kind, and several of them as one list of rows."""

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.corpus.cache import SUFFIXES, Cache, first_bytes
from paddle_vl.data.corpus.csv_shard import CsvShard, TsvShard
from paddle_vl.data.corpus.json_shard import json_kind
from paddle_vl.data.corpus.offset_index import existing_index
from paddle_vl.data.corpus.shard import IndexedShard, Shard
from paddle_vl.data.corpus.table_shard import ArrowShard, ParquetShard
from paddle_vl.data.corpus.tar_shard import TarShard
from paddle_vl.data.corpus.token_files import TokenShard
from paddle_vl.data.jsonl import MAX_LINE_BYTES, sample_at
from paddle_vl.data.worker_pool import results_in_order

logger = logging.getLogger(__name__)
# Fewer shards are opened in this process.
_WORTH_A_POOL = 4
_HEAD = 1 << 16
_JSON = (".jsonl", ".json", ".ndjson")
_TABLES = {".csv": CsvShard, ".tsv": TsvShard}
_OTHERS = {".parquet": ParquetShard, ".arrow": ArrowShard, ".tar": TarShard, ".idx": TokenShard}


@dataclass(frozen=True)
class ShardOpener:
    """Opens data files. It can be pickled.

    Attributes:
        cache: where indexes and copies lie.
        copies_all: whether all files are read from local copies; compressed ones always are.
        groups_at_once: row groups of a Parquet file that are mixed at a time.
    """

    cache: Cache = field(default_factory=Cache)
    copies_all: bool = False
    groups_at_once: int = 8
    max_line_bytes: int = MAX_LINE_BYTES

    def __call__(self, path: Path) -> Shard:
        """Open a file; its index is built if there is none.

        Raises:
            RuntimeError: it cannot be read, or its suffix is unknown.
        """
        is_compressed = path.suffix.lower() in SUFFIXES
        copies = self.cache if is_compressed or self.copies_all else None
        return shard_kind(path).opened(path, self.cache, copies, self.max_line_bytes)


def shard_kind(path: Path) -> type[Shard]:
    """How a file has its rows, by its suffix and of JSON by its beginning.

    Raises:
        RuntimeError: it cannot be read, or its suffix is unknown.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    is_compressed = bool(suffixes) and suffixes[-1] in SUFFIXES
    suffix = "".join(suffixes[-2:-1] if is_compressed else suffixes[-1:])
    if suffix in _JSON:
        return json_kind(first_bytes(path, _HEAD), suffix == ".json")
    kinds = _TABLES if is_compressed else {**_TABLES, **_OTHERS}
    if suffix not in kinds:
        raise RuntimeError(
            f"data file {path} has no known suffix: {', '.join((*_JSON, *_TABLES))} (also with .gz "
            "or .zst), .parquet, .arrow, .tar, .idx and .bin are read"
        )
    return kinds[suffix]


def open_shards(files: Sequence[str], opener: ShardOpener, num_processes: int) -> list[Shard]:
    """Open data files; missing indexes are built by several processes.

    Raises:
        RuntimeError: a file cannot be read, or is of no known kind.
    """
    paths = [Path(file) for file in files]
    if num_processes > 1 and len(paths) >= _WORTH_A_POOL:
        missing = [
            path
            for path in paths
            if issubclass(shard_kind(path), IndexedShard)
            and existing_index(path, opener.cache) is None
        ]
        workers = min(num_processes, len(missing))
        if len(missing) >= _WORTH_A_POOL:
            number = len(missing)
            logger.info("building the index of %d data files in %d processes", number, workers)
            # Largest first, so that no process is left with a large one at the end.
            by_size = sorted(missing, key=lambda path: -os.path.getsize(path))
            jobs = [(path,) for path in by_size]
            for _ in results_in_order(ShardOpener.__call__, opener, jobs, workers):
                continue
    return [opener(path) for path in paths]


class Shards:
    """Base of what has rows in several data files, in their order.

    Attributes:
        shards: the data files.
    """

    shards: tuple[Shard, ...]

    @property
    def fingerprint(self) -> int:
        """Hash of the content of all shards, in order."""
        hashed = xxh3_64()
        for shard in self.shards:
            hashed.update(f"{shard.content}:{shard.count},".encode())
        return hashed.intdigest()

    @property
    def samples(self) -> int:
        """Hash of the sizes of all shards and of some of their blocks."""
        return xxh3_64(",".join(shard.samples for shard in self.shards).encode()).intdigest()

    def place(self, number: int) -> str:
        """The place of a row: `file:line` or the like."""
        shard, row = self.shard_of(number)
        return shard.place(row)

    def shard_of(self, number: int) -> tuple[Shard, int]:
        """The shard that has a row, and its number in it."""
        shard = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self.shards[shard], number - int(self._starts[shard])

    def at_place(self, number: int) -> AbstractContextManager[None]:
        """Add a row's place to what is raised, see `sample_at`."""
        return sample_at(partial(self.place, number))

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum([shard.count for shard in self.shards])])[:-1]
