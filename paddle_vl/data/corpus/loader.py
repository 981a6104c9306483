"""Batches of a mix of sources, prefetched by worker processes; resumable at any batch.

Micro-batch t of the run has rows `t * G` to `(t + 1) * G` of the stream of rows (G rows over all
ranks), of which a rank takes every `size`-th. Rows of `PHASES` consecutive micro-batches lie in
different lanes (`paddle_vl.data.corpus.lanes`), so that workers prepare them at the same time; a
lane stays with one worker, which keeps its documents.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple, Protocol

import numpy as np

from paddle_vl.batch.schema import SOURCE_COUNTS
from paddle_vl.data.corpus.lanes import DOCUMENTS, LaneState, Piece, RowMaker
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.packing import check_ranks
from paddle_vl.data.worker_pool import WorkerPool, current_sample, note_sample

PHASES = 16
_CALL_S = 0.2


class RowCollator(Protocol):
    """Makes a batch of rows of pieces."""

    def __call__(self, rows: Sequence[Sequence[Piece]]) -> dict[str, Any]: ...


class MadeRows(NamedTuple):
    """A batch, and the states of its lanes afterwards."""

    batch: dict[str, Any]
    states: dict[int, LaneState]


class CorpusLoader:
    """An endless iterator over training batches; see `PrefetchLoader` for the interface.

    Every batch has the tokens and documents of each source in it, `[S]` int64, under
    the keys of `SOURCE_COUNTS`. A document counts where it begins.

    Attributes:
        epoch, batches_consumed: place in the data in documents of all sources: `batches_consumed`
            of `len(self)` documents of epoch `epoch`, as if all ranks were where this one is.
        names: of the sources.
        while_waiting: called repeatedly while workers prepare the next batch.
    """

    while_waiting: Callable[[], None] = staticmethod(lambda: None)

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
            maker: of the rows; it must have `num_lanes(batch_size, size)` lanes.
            batch_size: rows per batch and data-parallel rank.
            num_documents: documents of all sources.
            stream: what determines the rows, for resumed runs: JSON values.
            rank, size: data-parallel rank and world size.
        """
        check_ranks(batch_size, rank, size)
        self._maker, self._collator = maker, collator
        self._batch_size, self.rank, self.size = batch_size, rank, size
        self.names, self._num_documents = list(names), num_documents
        self._stream = {"global_batch_size": batch_size * size, **stream}
        self._num_workers = num_workers
        self._max_pending = min(max(prefetch_batches, num_workers), PHASES)
        self._pools: list[WorkerPool] = []
        self._pending: deque[Future[MadeRows]] = deque()
        self._states: dict[int, LaneState] = {}
        self._step = 0

    @staticmethod
    def num_lanes(batch_size: int, size: int) -> int:
        """Lanes of a stream of rows with so many rows in a global batch."""
        return PHASES * batch_size * size

    def __iter__(self) -> "CorpusLoader":
        return self

    def __next__(self) -> dict[str, Any]:
        """The next batch.

        Raises:
            BadSampleError: a bad document where they are not skipped, as `file:line: reason`.
            RuntimeError: a worker process died.
        """
        made = self._made()
        self._states.update(made.states)
        self._step += 1
        if self._num_workers:
            self._request()
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
        """Bad documents of this rank's lanes that were left out, by kind of fault."""
        total: Counter[str] = Counter()
        for state in self._states.values():
            total.update(state.skipped)
        return dict(total)

    def state_dict(self) -> dict[str, Any]:
        """Position after the last returned batch, with the states of this rank's lanes; JSON
        values. `merged_states` joins those of all ranks."""
        lanes = {str(lane): state.to_json() for lane, state in sorted(self._states.items())}
        return {"step": self._step, "lanes": lanes, "stream": self._stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position, with the batches that an uninterrupted run would get.

        Raises:
            ValueError: data or settings differ from those of the state; every difference is named.
        """
        was = state.get("stream", {})
        differing = [
            f"{name} was {was.get(name)} and is {value}"
            for name, value in self._stream.items()
            if was.get(name) != value
        ]
        if differing or "lanes" not in state:
            raise ValueError(
                f"cannot continue in the data: {'; '.join(differing) or 'it was no mix of sources'}"
                ". The documents or their order would differ; restore the data and settings of the "
                "run, or start a new one"
            )
        self._drop_pending()
        self._states = {
            int(lane): LaneState.from_json(values)
            for lane, values in state["lanes"].items()
            if int(lane) % self.size == self.rank
        }
        self._step = state["step"]

    def waiting_for(self) -> str:
        """Description of the batch that `next` waits for; thread-safe."""
        text = f"micro-batch {self._step + 1} of a mix of {', '.join(self.names)}"
        if self.size > 1:
            text += f" of data-parallel rank {self.rank}"
        if not self._num_workers:
            at = self._at(current_sample())
            return f"{text}; this process prepares it itself (data.num_workers is 0) and {at}"
        worker, pools = self._step % PHASES % self._num_workers, self._pools
        progress = pools[worker].progress() if worker < len(pools) else []
        if not progress:
            return f"{text}; worker {worker}, which prepares it, has not started"
        return f"{text}; worker {worker} (process {progress[0].pid}) {self._at(progress[0].sample)}"

    def _at(self, sample: int | None) -> str:
        if sample is None:
            return "is between documents"
        source, number = divmod(sample, DOCUMENTS)
        return f"is at {self._maker.sources[source].where(number)}"

    def close(self) -> None:
        """End the worker processes. The next batch starts new ones."""
        for pool in self._pools:
            pool.close()
        self._pools = []
        self._drop_pending()

    def __enter__(self) -> "CorpusLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _consumed(self) -> int:
        return self.size * sum(sum(state.drawn) for state in self._states.values())

    def _lanes(self, step: int) -> list[int]:
        """Lanes of this rank's rows of a micro-batch."""
        rows = self._batch_size * self.size
        first = step % PHASES * rows
        return list(range(first + self.rank, first + rows, self.size))

    def _lane_states(self, step: int) -> dict[int, LaneState]:
        new = LaneState.new(len(self.names))
        return {lane: self._states.get(lane, new) for lane in self._lanes(step)}

    def _made(self) -> MadeRows:
        if self._num_workers == 0:
            return make_rows(self._maker, self._collator, self._lane_states(self._step))
        try:
            self._request()
            future = self._pending[0]
            while not wait([future], _CALL_S).done:
                self.while_waiting()
            made = future.result()
            self._pending.popleft()
            return made
        except BrokenProcessPool as error:
            self.close()
            raise RuntimeError(
                f"a data worker process died while preparing micro-batch {self._step + 1}. Its own "
                "message, if any, is above; without one it was most likely killed for memory: "
                "lower data.num_workers or data.prefetch_batches. data.num_workers=0 prepares "
                "batches in this process"
            ) from error
        except (BadSampleError, RuntimeError) as error:
            self.close()
            # Drop the pool's frames: the command line classifies an error by its last frame.
            raise error.with_traceback(None) from error.__cause__
        except BaseException:
            self.close()
            raise

    def _request(self) -> None:
        """Submit micro-batches up to the prefetch limit; each lane to the same worker always."""
        while len(self._pools) < self._num_workers:
            self._pools.append(WorkerPool(self._maker, self._collator, 1))
        while len(self._pending) < self._max_pending:
            step = self._step + len(self._pending)
            pool = self._pools[step % PHASES % self._num_workers]
            self._pending.append(pool.submit(make_rows, self._lane_states(step)))

    def _drop_pending(self) -> None:
        for future in self._pending:
            future.cancel()
        self._pending.clear()


def make_rows(maker: RowMaker, collator: Any, states: Mapping[int, LaneState]) -> MadeRows:
    """The next row of each lane as a batch.

    Raises:
        BadSampleError: see `RowMaker.row`.
    """
    made = {lane: maker.row(lane, state) for lane, state in states.items()}
    rows = [pieces for pieces, _ in made.values()]
    note_sample(None)
    batch = collator(rows)
    tokens, documents = np.zeros((2, len(maker.sources)), dtype=np.int64)
    for piece in (piece for row in rows for piece in row):
        tokens[piece.source] += len(piece.sample["input_ids"])
        documents[piece.source] += piece.is_first
    batch.update(zip(SOURCE_COUNTS, (tokens, documents), strict=True))
    return MadeRows(batch, {lane: state for lane, (_, state) in made.items()})


def merged_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states of all ranks' loaders as one; of loaders whose state is the same on every rank,
    the first."""
    if "lanes" not in states[0]:
        return states[0]
    lanes = {lane: each for state in states for lane, each in state["lanes"].items()}
    return {**states[0], "lanes": lanes}
