"""The sources of a mix: their shards, the order of their documents, and their shares."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from xxhash import xxh3_64

from paddle_vl.config.data_sources import SourceConfig
from paddle_vl.data.corpus.cache import SUFFIXES, CacheFolders, LocalCopies
from paddle_vl.data.corpus.document import EncodedDocument
from paddle_vl.data.corpus.lanes import Mix
from paddle_vl.data.corpus.offset_index import NoIndexError
from paddle_vl.data.corpus.order import DocumentOrder
from paddle_vl.data.corpus.parquet_shard import ParquetShard
from paddle_vl.data.corpus.shard import JsonlShard, Row, Shard
from paddle_vl.data.corpus.tar_shard import TarShard
from paddle_vl.data.corpus.token_files import TokenShard
from paddle_vl.data.jsonl import MAX_LINE_BYTES, BadSampleError, sample_at
from paddle_vl.data.worker_pool import first_time, results_in_order
from paddle_vl.threads import Watch

logger = logging.getLogger(__name__)
# Documents whose tokens are counted for the starts of a mix.
_MEASURED = 32
_REMEMBERED = 16
# Fewer shards are opened in this process.
_WORTH_A_POOL = 4
_LINES = (".jsonl", ".json", ".ndjson")
_KINDS = {
    **dict.fromkeys(_LINES, JsonlShard),
    ".parquet": ParquetShard,
    ".tar": TarShard,
    ".idx": TokenShard,
}

# Makes a document of a row and the folder of its data file, where relative paths start; raises a
# BadSampleError for a row that cannot be used. It can be pickled.
Encoder = Callable[[Row, Path], EncodedDocument]


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


@dataclass(frozen=True)
class Source:
    """One source with its opened shards. It can be pickled.

    Attributes:
        name: its name in metrics.
        shards: in the order of its files.
        order: of its documents.
        encode: makes documents of its rows.
        copies: where its shards are copied to before they are needed; None to not do that.
    """

    name: str
    shards: tuple[Shard, ...]
    order: DocumentOrder
    encode: Encoder
    copies: LocalCopies | None = None

    @property
    def num_documents(self) -> int:
        """Documents of an epoch."""
        return self.order.count

    @property
    def fingerprint(self) -> int:
        """Hash of the content of all shards, in order."""
        return self._hash_of(lambda shard: shard.content)

    @property
    def sums(self) -> int:
        """Hash of the sums of the blocks of all shards, see `offset_index`."""
        return self._hash_of(lambda shard: shard.sums)

    def _hash_of(self, number: Callable[[Shard], int]) -> int:
        hashed = xxh3_64()
        for shard in self.shards:
            hashed.update(f"{number(shard)}:{shard.count},".encode())
        return hashed.intdigest()

    def encoded(self, number: int) -> EncodedDocument:
        """See `paddle_vl.data.corpus.lanes.Documents`."""
        if self.copies is not None:
            self._fetch_ahead(number)
        return self.document(self.order.document(number))

    def where(self, number: int) -> str:
        """See `paddle_vl.data.corpus.lanes.Documents`."""
        return self.place(self.order.document(number))

    def document(self, document: int) -> EncodedDocument:
        """A document by its number in the order of the files.

        Raises:
            BadSampleError: it cannot be used, as `file:line: reason`.
        """
        shard, row = self._shard_of(document)
        try:
            found = self.encode(shard.read(row), Path(shard.path).parent)
        except (BadSampleError, ValueError, ArithmeticError, RecursionError, OSError) as error:
            # The place of a row may take a search through its file.
            with sample_at(shard.place(row)):
                raise error
        if found.note and first_time(shard.path):
            logger.warning("%s: %s", shard.path, found.note)
        return found

    def place(self, document: int) -> str:
        """The place of a document: `file:line` or the like."""
        shard, row = self._shard_of(document)
        return shard.place(row)

    def _shard_of(self, document: int) -> tuple[Shard, int]:
        shard = int(np.searchsorted(self._starts, document, side="right")) - 1
        return self.shards[shard], document - int(self._starts[shard])

    def _fetch_ahead(self, number: int) -> None:
        """When a block of shards begins, copy those of the next one in the background."""
        block = self.order.block(number)
        if block in self._fetched:
            return
        # Lanes are near each other, so that a few blocks are enough to remember.
        del self._fetched[:-_REMEMBERED]
        self._fetched.append(block)
        shards = [self.shards[group] for group in self.order.groups_after(*block)]
        Watch(_fetch, "copies-ahead", (self.copies, shards)).start()

    @cached_property
    def _fetched(self) -> list[tuple[int, int]]:
        return []

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum([shard.count for shard in self.shards])])[:-1]


def open_sources(
    configs: Sequence[SourceConfig],
    opener: ShardOpener,
    encoder: Callable[[SourceConfig], Encoder],
    *,
    seed: int,
    groups_at_once: int | None = None,
    num_processes: int = 1,
) -> list[Source]:
    """Open the shards of all sources; missing indexes are built by several processes.

    Args:
        groups_at_once: see `DocumentOrder`; None for any order, but a few row groups of Parquet
            files at a time.

    Raises:
        RuntimeError: a file cannot be read, or is of no known kind.
        ValueError: a source has no file or no document.
    """
    files = [source.files() for source in configs]
    for source, found in zip(configs, files, strict=True):
        if not found:
            raise ValueError(f"source {source.label} has no file: {source.path}")
    shards = iter(open_shards([file for found in files for file in found], opener, num_processes))
    opened = []
    for source, found in zip(configs, files, strict=True):
        own = tuple(next(shards) for _ in found)
        groups = tuple(count for shard in own for count in shard.groups if count)
        if not groups:
            raise ValueError(f"source {source.label} has no document in {', '.join(found[:5])}")
        has_parts = any(len(shard.groups) > 1 for shard in own)
        at_once = opener.groups_at_once if has_parts else groups_at_once
        # Row groups of a file are not copied one by one, and empty shards are no groups.
        is_copied = opener.copies_all and len(groups) == len(own)
        key = xxh3_64(source.label.encode()).intdigest() >> 1
        order = DocumentOrder(groups, at_once, (seed << 63) + key)
        copies = opener.copies if is_copied else None
        opened.append(Source(source.label, own, order, encoder(source), copies))
    return opened


def _fetch(copies: LocalCopies, shards: Sequence[Shard]) -> None:
    for shard in shards:
        try:
            copies.file(Path(shard.path))
        except (RuntimeError, OSError) as error:
            # Reading the shard raises it again.
            logger.warning("%s is not copied ahead: %s", shard.path, error)


def mix_of(
    configs: Sequence[SourceConfig],
    sources: Sequence[Source],
    temperature: float | None,
    seed: int,
) -> Mix:
    """Shares by weights (of tokens), or by numbers of documents to the power of 1 / temperature (of
    documents). For shares of tokens a few documents of each source are measured."""
    weights = [config.weight for config in configs]
    if all(weight is not None for weight in weights):
        shares = tuple(float(weight or 0) for weight in weights)
        return Mix(shares, True, seed, tuple(map(_typical_size, sources)))
    power = 1.0 if temperature is None else 1.0 / temperature
    shares = tuple(source.num_documents**power for source in sources)
    return Mix(shares, False, seed, (1.0,) * len(shares))


def _typical_size(source: Source) -> float:
    """Tokens of a document, weighted by themselves, from the first ones of the stream."""
    sizes: list[int] = []
    for number in range(min(_MEASURED, source.num_documents)):
        # A run says what is wrong with a bad document when it comes to it.
        with suppress(BadSampleError):
            sizes.append(len(source.document(source.order.document(number))))
    return sum(size**2 for size in sizes) / sum(sizes) if sizes else 1.0
