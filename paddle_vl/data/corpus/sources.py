"""The sources of a mix: their shards, and the order of their documents."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from xxhash import xxh3_64

from paddle_vl.config.data_sources import SourceConfig
from paddle_vl.data.corpus.cache import Cache
from paddle_vl.data.corpus.document import EncodedDocument
from paddle_vl.data.corpus.opener import ShardOpener, Shards, open_shards
from paddle_vl.data.corpus.order import DocumentOrder
from paddle_vl.data.corpus.shard import Row, Shard
from paddle_vl.data.worker_pool import warn_once
from paddle_vl.threads import Watch

logger = logging.getLogger(__name__)
_REMEMBERED = 16

# Makes a document of a row and the folder of its data file, where relative paths start; raises a
# BadSampleError for a row that cannot be used. It can be pickled.
Encoder = Callable[[Row, Path], EncodedDocument]


@dataclass(frozen=True)
class Source(Shards):
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
    copies: Cache | None = None

    @property
    def num_documents(self) -> int:
        """Documents of an epoch."""
        return self.order.count

    def encoded(self, number: int) -> EncodedDocument:
        """The document at a place of the endless stream.

        Raises:
            BadSampleError: it cannot be used; with its place.
        """
        if self.copies is not None:
            self._fetch_ahead(number)
        return self.document(self.order.document(number))

    def where(self, number: int) -> str:
        """The place of that document: `file:line` or the like."""
        return self.place(self.order.document(number))

    def document(self, document: int) -> EncodedDocument:
        """A document by its number in the order of the files.

        Raises:
            BadSampleError: it cannot be used, as `file:line: reason`.
        """
        shard, row = self.shard_of(document)
        with self.at_place(document):
            found = self.encode(shard.read(row), Path(shard.path).parent)
        if found.note:
            warn_once(logger, shard.path, f"{shard.path}: {found.note}")
        return found

    def _fetch_ahead(self, number: int) -> None:
        """When a block of shards begins, copy those of the next one in the background."""
        block = self.order.block(number)
        if block in self._fetched:
            return
        # Strands are near each other, so that a few blocks are enough to remember.
        del self._fetched[:-_REMEMBERED]
        self._fetched.append(block)
        shards = [self.shards[group] for group in self.order.groups_after(*block)]
        Watch(_fetch, "copies-ahead", (self.copies, shards)).start()

    @cached_property
    def _fetched(self) -> list[tuple[int, int]]:
        return []


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
        copies = opener.cache if is_copied else None
        opened.append(Source(source.label, own, order, encoder(source), copies))
    return opened


def _fetch(copies: Cache, shards: Sequence[Shard]) -> None:
    for shard in shards:
        try:
            copies.copy_of(shard.path, shard.state)
        except (RuntimeError, OSError) as error:
            # Reading the shard raises it again.
            logger.warning("%s is not copied ahead: %s", shard.path, error)
