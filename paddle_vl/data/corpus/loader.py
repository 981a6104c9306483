"""Batches of a mix of sources, prefetched by worker processes; resumable at any batch.

Micro-batch t of the run has rows `t * G` to `(t + 1) * G` of the stream of rows (G rows over all
ranks), of which a rank takes every `size`-th. Rows of `PHASES` consecutive micro-batches lie in
different strands (`paddle_vl.data.corpus.packed_rows`), so that workers prepare them at the same
time; a strand stays with one worker, which keeps its documents.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paddle_vl.data.corpus.packed_rows import DOCUMENTS, Piece, RowMaker, StrandState
from paddle_vl.data.packing import check_ranks
from paddle_vl.data.prefetch import LoadedBatch, PendingBatch, PrefetchingLoader
from paddle_vl.data.worker_pool import note_sample

PHASES = 16


# Makes a batch of rows of pieces.
RowCollator = Callable[[Sequence[Sequence[Piece]]], dict[str, Any]]


class CorpusLoader(PrefetchingLoader):
    """An endless iterator over training batches; see `PrefetchLoader` for the interface.

    Every batch has `source_tokens` and `source_documents`, those of each source in it. A document
    counts where it begins.

    Attributes:
        epoch, batches_consumed: place in the data in documents of all sources: `batches_consumed`
            of `len(self)` documents of epoch `epoch`, as if all ranks were where this one is.
        names: of the sources.
    """

    what = "documents"

    def __init__(
        self,
        maker: RowMaker,
        collator: RowCollator,
        batch_size: int,
        *,
        names: Sequence[str],
        num_documents: int,
        stream: Mapping[str, Any],
        num_workers: int = 0,
        prefetch_batches: int = 2,
        rank: int = 0,
        size: int = 1,
    ):
        """
        Args:
            maker: of the rows; it must have `num_strands(batch_size, size)` strands.
            batch_size: rows per batch and data-parallel rank.
            num_documents: documents of all sources.
            stream: what determines the rows, for resumed runs: JSON values.
            rank, size: data-parallel rank and world size.
        """
        check_ranks(batch_size, rank, size)
        ahead = min(max(prefetch_batches, num_workers), PHASES)
        # Each strand goes to the same worker always.
        super().__init__(
            make_rows, maker, collator, num_workers, ahead, rank, size, num_pools=num_workers
        )
        self._maker, self._batch_size = maker, batch_size
        self.names, self._num_documents = list(names), num_documents
        self._stream = {"global_batch_size": batch_size * size, **stream}
        # JSON values, see `StrandState.to_json`.
        self._states: dict[int, Any] = {}
        self._step = 0

    @staticmethod
    def num_strands(batch_size: int, size: int) -> int:
        """Strands of a stream of rows with so many rows in a global batch."""
        return PHASES * batch_size * size

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            BadSampleError: a bad document where they are not skipped, as `file:line: reason`.
            RuntimeError: a worker process died.
        """
        made = self._loaded()
        self._states.update(made.more)
        self._step += 1
        self._request_ahead()
        assert made.batch is not None, "a row of a mix has a piece"
        return made.batch

    def __len__(self) -> int:
        """Documents of one epoch of all sources."""
        return self._num_documents

    def batches_in(self, num_epochs: float) -> float:
        """
        Raises:
            ValueError: always; the number of tokens is known only when all documents were read.
        """
        raise ValueError(
            f"train.num_train_epochs is {num_epochs} but data.train is a mix of sources, whose "
            "length in tokens is known only when they are read: set train.max_steps or "
            "train.max_tokens instead"
        )

    @property
    def documents(self) -> list[int]:
        """Documents of each source in an epoch."""
        return list(self._stream["documents"])

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return self._consumed() // self._num_documents

    @property
    def batches_consumed(self) -> int:
        """Documents of the current epoch that were used."""
        return self._consumed() % self._num_documents

    @property
    def skipped(self) -> dict[str, int]:
        """Bad documents of this rank's strands that were left out, by kind of fault."""
        total: Counter[str] = Counter()
        for *_, skipped in self._states.values():
            total.update(skipped)
        return dict(total)

    def state_dict(self) -> dict[str, Any]:
        """Position after the last returned batch, with the states of this rank's strands; JSON
        values. `merged_states` joins those of all ranks."""
        strands = {str(strand): state for strand, state in sorted(self._states.items())}
        return {"step": self._step, "lanes": strands, "stream": self._stream}

    def load_state_dict(self, state: dict[str, Any], batches: int | None = None) -> None:
        self._refuse_changes(self._differing(state.get("stream")))
        try:
            step = int(state["step"])
            states = {
                int(name): StrandState.from_json(values).to_json()
                for name, values in state["lanes"].items()
            }
            # Those of the rows of all ranks in the first micro-batches.
            if set(states) != set(range(min(step, PHASES) * self._batch_size * self.size)):
                raise ValueError(f"step {step} with {len(states)} strands")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "cannot continue in the data: the checkpoint's position is damaged "
                f"({error!r:.80}): continue from another checkpoint"
            ) from error
        if batches is not None and step != batches:
            raise ValueError(f"data: step is {step}; the run had used {batches} batches")
        self._drop_pending()
        self._states = {
            strand: each for strand, each in states.items() if strand % self.size == self.rank
        }
        self._step = step

    def _differing(self, was: Any) -> list[str]:
        """What is other than in a saved stream."""
        was, here = was if isinstance(was, dict) else {}, dict(self._stream)
        if "samples" not in was:
            # Of an earlier version.
            here.pop("samples", None)
        problems = []
        for name in ("sources", "samples"):
            old, new = was.get(name), here.get(name)
            if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
                del here[name]
                problems += [
                    f"the data files of source {source} were changed, added or removed"
                    for source in new
                    if old[source] != new[source]
                ]
        problems += [
            f"{name} was {was.get(name)} and is {value}"
            for name, value in here.items()
            if was.get(name) != value
        ]
        return list(dict.fromkeys(problems))

    def _consumed(self) -> int:
        return self.size * sum(sum(drawn) for drawn, *_ in self._states.values())

    def _job(self, ahead: int) -> tuple[PendingBatch, tuple[Any, ...]]:
        """See the base; the strands of this rank's rows are the argument, with their states."""
        step, rows = self._step + ahead, self._batch_size * self.size
        first, new = step % PHASES * rows, StrandState.new(len(self.names)).to_json()
        strands = range(first + self.rank, first + rows, self.size)
        name = f"micro-batch {step + 1} of a mix of {', '.join(self.names)}"
        pool = step % PHASES % (self._num_workers or 1)
        return PendingBatch(name, pool), (
            {strand: self._states.get(strand, new) for strand in strands},
        )

    def _place(self, sample: int) -> str:
        source, number = divmod(sample, DOCUMENTS)
        return self._maker.sources[source].where(number)


def make_rows(maker: RowMaker, collator: Any, states: Mapping[int, Any]) -> LoadedBatch:
    """The next row of each strand as a batch.

    Args:
        states: of the strands, see `StrandState.to_json`.

    Raises:
        BadSampleError: see `RowMaker.row`.
    """
    made = {
        strand: maker.row(strand, StrandState.from_json(each)) for strand, each in states.items()
    }
    rows = [pieces for pieces, _ in made.values()]
    note_sample(None)
    batch = collator(rows)
    tokens, documents = np.zeros((2, len(maker.sources)), dtype=np.int64)
    for piece in (piece for row in rows for piece in row):
        tokens[piece.source] += len(piece.sample["input_ids"])
        documents[piece.source] += piece.is_first
    counts = {"source_tokens": tokens, "source_documents": documents}
    batch |= {name: tuple(each.tolist()) for name, each in counts.items()}
    return LoadedBatch(batch, {strand: state.to_json() for strand, (_, state) in made.items()})


def merged_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states of all ranks' loaders as one; of loaders whose state is the same on every rank,
    the first."""
    if "lanes" not in states[0]:
        return states[0]
    strands = {strand: each for state in states for strand, each in state["lanes"].items()}
    return {**states[0], "lanes": strands}
