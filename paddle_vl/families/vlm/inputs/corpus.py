"""Pretraining data of a run: its sources, the loader of packed rows, and samples to evaluate."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64

from paddle_vl.config.data_sources import SourceConfig, as_sources
from paddle_vl.data.corpus.cache import Cache
from paddle_vl.data.corpus.document import Sample
from paddle_vl.data.corpus.loader import CorpusLoader
from paddle_vl.data.corpus.opener import ShardOpener
from paddle_vl.data.corpus.packed_rows import Piece, RowMaker, mix_of
from paddle_vl.data.corpus.sources import Source, open_sources
from paddle_vl.data.corpus.tokenize import check_same_tokenizer
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.packing import RowBudget
from paddle_vl.families.vlm.inputs.collate import (
    PackedCollator,
    TokenSpan,
    VLCollator,
    sources_of_tokens,
    with_label_sources,
)
from paddle_vl.families.vlm.inputs.documents import DocumentEncoder
from paddle_vl.families.vlm.inputs.open_data import row_reader
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.settings import VLDataConfig

# Local copies beyond the shards that are mixed at a time: strands differ in their place.
_SPARE_COPIES = 4


@dataclass(frozen=True)
class Corpus:
    """The opened sources of data.train or data.eval.

    Attributes:
        configs: their settings, in the order of the sources.
        sources: in the order of the setting.
    """

    data: VLDataConfig
    configs: tuple[SourceConfig, ...]
    sources: tuple[Source, ...]
    seed: int

    @classmethod
    def opened(
        cls,
        entries: Sequence[str | SourceConfig],
        data: VLDataConfig,
        processor: VLProcessor,
        seed: int,
    ) -> "Corpus":
        """Open the files; missing indexes are built by data.num_workers processes.

        Raises:
            RuntimeError, ValueError: see `open_sources`.
            BadSampleError: where bad documents are not skipped, the first of a source is one.
        """
        by_shards = data.shuffle == "shards"
        configs = as_sources(entries)
        # Shards in use and those of the next block, of every source, as they share folders.
        copies = (2 * data.shuffle_shards + _SPARE_COPIES) * len(configs) if by_shards else None
        opener = ShardOpener(
            Cache(data.cache, copies),
            copies_all=by_shards,
            groups_at_once=data.shuffle_shards,
            max_line_bytes=data.max_line_bytes,
        )
        encoder = partial(_encoder, processor, data)
        sources = open_sources(
            configs,
            opener,
            encoder,
            seed=seed,
            groups_at_once=data.shuffle_shards if by_shards else None,
            num_processes=max(1, data.num_workers),
        )
        for shard in (shard for source in sources for shard in source.shards):
            if shard.path.endswith(".idx"):
                check_same_tokenizer(Path(shard.path), processor.tokenizer.to_json())
        if data.on_bad_sample == "fail":
            # Rows of another format show before the run has started.
            for source in sources:
                source.document(0)
        return cls(data, tuple(configs), tuple(sources), seed)

    def __len__(self) -> int:
        """Documents of all sources."""
        return sum(source.num_documents for source in self.sources)

    @property
    def names(self) -> list[str]:
        """Names of the sources."""
        return [source.name for source in self.sources]

    def train_loader(
        self,
        collator: VLCollator,
        batch_size: int,
        rank: int,
        size: int,
        prepared: Callable[[Any], Any] = lambda collator: collator,
    ) -> CorpusLoader:
        """Endless batches of rows of the mix.

        Args:
            batch_size: rows per batch and data-parallel rank.
            prepared: makes of a collator one whose batches are complete.
        """
        data = self.data
        mix = mix_of(self.configs, self.sources, data.temperature, self.seed)
        budget = row_budget(data)
        weights, names = tuple(each.loss_weight for each in self.configs), tuple(self.names)
        maker = RowMaker(
            self.sources,
            mix,
            CorpusLoader.num_strands(batch_size, size),
            budget,
            one_piece=not data.packing,
            on_bad_sample=data.on_bad_sample,
        )
        stream = {
            "sources": {source.name: source.fingerprint for source in self.sources},
            "samples": {source.name: source.samples for source in self.sources},
            "documents": [source.num_documents for source in self.sources],
            "shares": list(mix.shares),
            "shuffle": [data.shuffle, data.shuffle_shards],
            "seed": self.seed,
            "packing": data.packing,
            "row_tokens": budget.tokens,
            "max_vision_tokens_per_row": budget.vision_tokens,
        }
        return CorpusLoader(
            maker,
            prepared(
                PieceCollator(collator, data.packing, weights, names if len(names) > 1 else ())
            ),
            batch_size,
            names=self.names,
            num_documents=len(self),
            stream=stream,
            num_workers=data.num_workers,
            prefetch_batches=data.prefetch_batches,
            rank=rank,
            size=size,
        )

    def samples(self, sources: Sequence[str] | None = None) -> "CorpusSamples":
        """Documents as single samples in the order of the files, of all sources or the named."""
        chosen = [each for each in self.sources if sources is None or each.name in sources]
        return CorpusSamples(tuple(chosen), self.data.max_length, self.data.on_bad_sample)


def _encoder(processor: VLProcessor, data: VLDataConfig, source: SourceConfig) -> DocumentEncoder:
    longest = min(data.max_length, row_budget(data).tokens)
    return DocumentEncoder(processor, source, longest, row_reader(data, processor))


def row_budget(data: VLDataConfig) -> RowBudget:
    """Limits of a row; without packing those of a sample."""
    if not data.packing:
        return RowBudget(data.max_length)
    return RowBudget(data.packing_length or data.max_length, data.max_vision_tokens_per_row)


@dataclass(frozen=True)
class PieceCollator:
    """Collates rows of pieces; see `paddle_vl.data.corpus.loader.RowCollator`.

    Attributes:
        is_packed: whether a row may have several pieces.
        loss_weights: of each source.
        target_sources: names of the sources, if the loss of each is reported.
    """

    collator: VLCollator
    is_packed: bool
    loss_weights: tuple[float, ...]
    target_sources: tuple[str, ...] = ()

    def __call__(self, rows: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        samples = [[piece.sample for piece in row] for row in rows]
        batch: dict[str, Any] = {}
        if self.is_packed:
            batch.update(PackedCollator(self.collator)(samples))
        else:
            batch.update(self.collator([row[0] for row in samples]))
        spans = [
            [TokenSpan(len(each.sample["input_ids"]), each.source) for each in row] for row in rows
        ]
        if self.target_sources:
            batch = with_label_sources(batch, spans, len(self.target_sources))
        if set(self.loss_weights) == {1.0}:
            return batch
        mask_BL: np.ndarray = batch["attention_mask"]
        weights_BL = np.array(self.loss_weights, dtype=np.float32)[
            sources_of_tokens(mask_BL, spans)
        ]
        weights_BL[mask_BL == 0] = 1.0
        return {**batch, "loss_weights": weights_BL}


class CorpusSamples:
    """The documents of some sources as samples of a `PrefetchLoader`, for evaluation.

    A document longer than `max_length` is cut at the right, before an image if need be.
    """

    def __init__(self, sources: tuple[Source, ...], max_length: int, on_bad_sample: str):
        self.sources, self.max_length, self.on_bad_sample = sources, max_length, on_bad_sample
        self.files = [shard.path for source in sources for shard in source.shards]
        self.skipped: Counter[str] = Counter()
        counts = [source.num_documents for source in sources]
        self._starts = np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> Sample:
        """A sample of the collator.

        Raises:
            BadSampleError: the document cannot be used, as `file:line: reason`.
        """
        source, document = self._source_of(number)
        encoded = source.document(document)
        try:
            budget = RowBudget(self.max_length)
            end = encoded.end_of_piece(0, budget.tokens, budget.vision_limit)
            if end is None:
                raise encoded.too_large(0, budget)
            return encoded.piece(0, end)
        except BadSampleError as error:
            raise BadSampleError(error.kind, error.reason, source.place(document)) from error

    def place(self, number: int) -> str:
        """Location of a sample: `file:line` or the like."""
        source, document = self._source_of(number)
        return source.place(document)

    @property
    def fingerprint(self) -> int:
        """Hash of the content of all files."""
        return xxh3_64(str([each.fingerprint for each in self.sources]).encode()).intdigest()

    def _source_of(self, number: int) -> tuple[Source, int]:
        at = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self.sources[at], number - int(self._starts[at])
