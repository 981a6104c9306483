"""Data files as shards, by their suffix."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paddle_vl.data.corpus.cache import CacheFolders
from paddle_vl.data.corpus.jsonl_shard import JsonlShard
from paddle_vl.data.corpus.local_copies import SUFFIXES, LocalCopies
from paddle_vl.data.corpus.offset_index import NoIndexError
from paddle_vl.data.corpus.parquet_shard import ParquetShard
from paddle_vl.data.corpus.shard import Shard
from paddle_vl.data.corpus.tar_shard import TarShard
from paddle_vl.data.corpus.token_files import TokenShard
from paddle_vl.data.jsonl import MAX_LINE_BYTES
from paddle_vl.data.worker_pool import results_in_order

logger = logging.getLogger(__name__)
# Fewer shards are opened in this process.
_WORTH_A_POOL = 4

_LINES = (".jsonl", ".json", ".ndjson")
_KINDS = {
    **dict.fromkeys(_LINES, JsonlShard),
    ".parquet": ParquetShard,
    ".tar": TarShard,
    ".idx": TokenShard,
}


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

    def indexed(self, path: Path) -> Shard | None:
        """Open a file whose index exists; None if opening would build it.

        Raises:
            RuntimeError: it cannot be read, or its suffix is unknown.
        """
        folders = CacheFolders(self.folders.chosen, builds=False)
        try:
            return replace(self, folders=folders)(path)
        except NoIndexError:
            return None

    def __call__(self, path: Path) -> Shard:
        """Open a file; its index is built if there is none.

        Raises:
            RuntimeError: it cannot be read, or its suffix is unknown.
        """
        suffixes = [suffix.lower() for suffix in path.suffixes]
        is_compressed = bool(suffixes) and suffixes[-1] in SUFFIXES
        suffix = "".join(suffixes[-2:-1] if is_compressed else suffixes[-1:])
        if suffix in _LINES if is_compressed else suffix in _KINDS:
            copies = self.copies if is_compressed or self.copies_all else None
            return _KINDS[suffix].opened(path, self.folders, copies, self.max_line_bytes)
        raise RuntimeError(
            f"data file {path} has no known suffix: {', '.join(_LINES)} (also with .gz or .zst), "
            ".parquet, .tar, .idx and .bin are read"
        )


def open_shards(files: Sequence[str], opener: ShardOpener, num_processes: int) -> list[Shard]:
    """Open data files; missing indexes are built by several processes.

    Raises:
        RuntimeError: a file cannot be read, or is of no known kind.
    """
    shards = {file: opener.indexed(Path(file)) for file in files}
    missing = [file for file, shard in shards.items() if shard is None]
    workers = min(num_processes, len(missing))
    if workers > 1 and len(missing) >= _WORTH_A_POOL:
        logger.info("building the index of %d data files in %d processes", len(missing), workers)
        # Largest first, so that no process is left with a large one at the end.
        by_size = sorted(missing, key=lambda file: -os.path.getsize(file))
        for _ in results_in_order(_open, opener, [(Path(file),) for file in by_size], workers):
            continue
    return [shards[file] or opener(Path(file)) for file in files]


def _open(opener: ShardOpener, collator: None, path: Path) -> None:
    opener(path)
