"""A queue of requests to a model, which runs in one thread, several requests at once.

The model is not run in the event loop, so that connections live on while it computes. A batch is
what waits when the model is free; its requests have one layout.
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from paddle_vl.serving.metrics import Metrics

# Name of the histogram.
BATCH_SIZE = "paddle_vl_batch_size"


class ActorRequest(NamedTuple):
    """A checked request.

    Attributes:
        run: answers several requests of one layout, given their items. An answer that is an
            exception is that request's failure.
        item: for `run`.
        layout: equal for requests that may run together.
    """

    run: Callable[[Sequence[Any]], Sequence[Any]]
    item: Any
    layout: Hashable = None


@dataclass
class BatchSettings:
    """May be changed while the server runs.

    Attributes:
        max_batch_size: most requests of a batch.
        max_wait_time: seconds that a batch waits for more after the one before; 0 for not at all.
    """

    max_batch_size: int = 8
    max_wait_time: float = 0.0


class _Waiting(NamedTuple):
    request: ActorRequest
    answer: asyncio.Future


class BatchQueue:
    """Answers requests in the order of their arrival, those of one layout together. A connection
    has one at a time, so the limit of connections bounds the queue.

    Attributes:
        worker: the model's thread, which also loads it.
    """

    def __init__(self, settings: BatchSettings, metrics: Metrics):
        self.settings, self._metrics = settings, metrics
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task | None = None

    def __len__(self) -> int:
        """Requests that wait, without those that run."""
        return len(self._waiting)

    async def answer(self, request: ActorRequest) -> Any:
        """The answer to a request. Cancelled, it leaves the queue and does not run.

        Raises:
            Exception: what the model raised for this request.
        """
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(request, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run_batches())
        try:
            return await answer
        finally:
            self._waiting = [each for each in self._waiting if each.answer is not answer]

    async def _run_batches(self) -> None:
        """Run batches until nothing waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = self._next_batch()
            self._metrics.observe(BATCH_SIZE, len(batch))
            items = [each.request.item for each in batch]
            run = batch[0].request.run
            answers = await loop.run_in_executor(self.worker, answers_of, run, items)
            for each, answer in zip(batch, answers, strict=True):
                if each.answer.done():  # Its client has left, or its time is over.
                    continue
                if isinstance(answer, Exception):
                    each.answer.set_exception(answer)
                else:
                    each.answer.set_result(answer)
            await self._gather()

    def _next_batch(self) -> list[_Waiting]:
        """The requests like the first one, at most a batch; they leave the queue."""
        run, _, layout = self._waiting[0].request
        batch, others = [], []
        for each in self._waiting:
            fits = each.request.run == run and each.request.layout == layout
            is_taken = fits and len(batch) < self.settings.max_batch_size
            (batch if is_taken else others).append(each)
        self._waiting = others
        return batch

    async def _gather(self) -> None:
        """Wait for a full batch, at most `max_wait_time`."""
        end = time.monotonic() + self.settings.max_wait_time
        # Clients that have just got an answer need a moment to ask again.
        while len(self._waiting) < self.settings.max_batch_size and time.monotonic() < end:
            await asyncio.sleep(0.001)


def answers_of(
    run: Callable[[Sequence[Any]], Sequence[Any]], items: Sequence[Any]
) -> Sequence[Any]:
    """The answers of a batch. If it fails as a whole, each request runs again alone, so that only
    the one that fails gets the error. What a model raises is no refusal, so it is no ValueError."""
    try:
        return run(items)
    except Exception as error:
        if len(items) > 1:
            return [answers_of(run, [item])[0] for item in items]
        if not isinstance(error, ValueError):
            return [error]
        failure = RuntimeError(str(error))
        failure.__cause__ = error
        return [failure]
