"""Data files as shards, by their suffix."""

from dataclasses import dataclass
from pathlib import Path

from paddle_vl.data.corpus.jsonl_shard import JsonlShard
from paddle_vl.data.corpus.local_copies import SUFFIXES, LocalCopies
from paddle_vl.data.corpus.offset_index import CacheFolders
from paddle_vl.data.corpus.parquet_shard import ParquetShard
from paddle_vl.data.corpus.shard import Shard
from paddle_vl.data.corpus.tar_shard import TarShard
from paddle_vl.data.corpus.token_files import TokenShard
from paddle_vl.data.jsonl import MAX_LINE_BYTES

_LINES = (".jsonl", ".json", ".ndjson")


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

    def has_index(self, path: Path) -> bool:
        """Whether opening a file is quick: it has an index, or needs none."""
        needs_none = path.suffix.lower() in (".idx", ".parquet")
        return needs_none or any(True for _ in self.folders.existing(path, ".index"))

    def __call__(self, path: Path) -> Shard:
        """Open a file; its index is built if there is none.

        Raises:
            RuntimeError: it cannot be read, or its suffix is unknown.
        """
        suffixes = [suffix.lower() for suffix in path.suffixes]
        is_compressed = bool(suffixes) and suffixes[-1] in SUFFIXES
        kind = suffixes[-2:-1] if is_compressed else suffixes[-1:]
        copies = self.copies if is_compressed or self.copies_all else None
        if kind and kind[0] in _LINES:
            return JsonlShard.opened(path, self.folders, copies, self.max_line_bytes)
        if kind == [".idx"] and not is_compressed:
            return TokenShard.opened(path)
        if kind == [".parquet"] and not is_compressed:
            return ParquetShard.opened(path, copies)
        if kind == [".tar"] and not is_compressed:
            return TarShard.opened(path, self.folders, copies)
        raise RuntimeError(
            f"data file {path} has no known suffix: {', '.join(_LINES)} (also with .gz or .zst), "
            ".parquet, .tar, .idx and .bin are read"
        )
