"""Data files by their kind, and several of them as one list of rows."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.corpus.arrow_shard import ArrowShard
from paddle_vl.data.corpus.cache import SUFFIXES, CacheFolders, LocalCopies, first_bytes
from paddle_vl.data.corpus.csv_shard import CsvShard, TsvShard
from paddle_vl.data.corpus.json_shard import json_kind
from paddle_vl.data.corpus.offset_index import NoIndexError
from paddle_vl.data.corpus.parquet_shard import ParquetShard
from paddle_vl.data.corpus.shard import Shard
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
        folders: where indexes and copies lie.
        copies: of files that are read from copies: compressed ones, and with `copies_all` all.
        groups_at_once: row groups of a Parquet file that are mixed at a time.
    """

    folders: CacheFolders
    copies: LocalCopies
    copies_all: bool = False
    groups_at_once: int = 8
    max_line_bytes: int = MAX_LINE_BYTES

    def __call__(self, path: Path) -> Shard:
        """Open a file; its index is built if there is none.

        Raises:
            RuntimeError: it cannot be read, or its suffix is unknown.
        """
        suffixes = [suffix.lower() for suffix in path.suffixes]
        is_compressed = bool(suffixes) and suffixes[-1] in SUFFIXES
        suffix = "".join(suffixes[-2:-1] if is_compressed else suffixes[-1:])
        copies = self.copies if is_compressed or self.copies_all else None
        if suffix in _JSON:
            kind = json_kind(first_bytes(path, _HEAD), suffix == ".json")
        elif suffix in _TABLES:
            kind = _TABLES[suffix]
        elif suffix in _OTHERS and not is_compressed:
            kind = _OTHERS[suffix]
        else:
            raise RuntimeError(
                f"data file {path} has no known suffix: {', '.join((*_JSON, *_TABLES))} (also with "
                ".gz or .zst), .parquet, .arrow, .tar, .idx and .bin are read"
            )
        return kind.opened(path, self.folders, copies, self.max_line_bytes)


def open_shards(files: Sequence[str], opener: ShardOpener, num_processes: int) -> list[Shard]:
    """Open data files; missing indexes are built by several processes.

    Raises:
        RuntimeError: a file cannot be read, or is of no known kind.
    """
    only_indexed = replace(opener, folders=CacheFolders(opener.folders.chosen, builds=False))
    shards: dict[str, Shard] = {}
    for file in files:
        with suppress(NoIndexError):
            shards[file] = only_indexed(Path(file))
    missing = [file for file in files if file not in shards]
    workers = min(num_processes, len(missing))
    if workers > 1 and len(missing) >= _WORTH_A_POOL:
        logger.info("building the index of %d data files in %d processes", len(missing), workers)
        # Largest first, so that no process is left with a large one at the end.
        by_size = sorted(missing, key=lambda file: -os.path.getsize(file))
        for _ in results_in_order(
            ShardOpener.__call__, opener, [(Path(f),) for f in by_size], workers
        ):
            continue
    return [shards.get(file) or opener(Path(file)) for file in files]


class Shards:
    """Base of what has rows in several data files, in their order.

    Attributes:
        shards: the data files.
    """

    shards: tuple[Shard, ...]

    @property
    def fingerprint(self) -> int:
        """Hash of the content of all shards, in order."""
        return self._hash_of(lambda shard: shard.content)

    @property
    def sums(self) -> int:
        """Hash of the sums of the blocks of all shards, see `offset_index`."""
        return self._hash_of(lambda shard: shard.sums)

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

    def _hash_of(self, number: Callable[[Shard], int]) -> int:
        hashed = xxh3_64()
        for shard in self.shards:
            hashed.update(f"{number(shard)}:{shard.count},".encode())
        return hashed.intdigest()

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum([shard.count for shard in self.shards])])[:-1]
