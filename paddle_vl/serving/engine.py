"""Continuous batching: requests join and leave a running batch of one model between its steps.

One thread runs the model. A step runs at most `max_num_batched_tokens` of prompts, then one token
of every running answer. Requests begin in the order of their arrival, when there is memory for the
keys and values of prompt and answer; none overtakes another, and none loses what it has.

A result does not depend on what the other rows of a step are. Only how many there are may change
its last bits, as matrix products of other shapes add in another order; with `batch_invariant` all
steps have one shape. (Experts are the exception: their products have as many rows as choose them.)
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.export.qwen3_vl.exported import ExportedQwen3VL
from paddle_vl.families.vlm.answering.batched import BatchedModel
from paddle_vl.generation.sampling import AnswerRow, ChosenToken, Sampling, choose_tokens
from paddle_vl.processes import release_free_memory
from paddle_vl.serving.exported_rows import ExportedRows
from paddle_vl.threads import Watch

logger = logging.getLogger(__name__)
# Of the rate of tokens: one step's share in the running mean.
_SMOOTHING = 0.1
# Without a request for so long, the engine gives free memory back.
_IDLE_S = 1.0


@dataclass
class Request:
    """A prompt, as the processor gives it, and how to answer it.

    The engine knows equal images and videos by checksums of their patches.

    Attributes:
        input_ids: `[L]` int64.
        visual: `pixel_values`, `image_grid_thw`, `pixel_values_videos`, `video_grid_thw`, those
            that there are.
        adapter: name of a LoRA folder of the engine; None for the base model.
    """

    input_ids: np.ndarray
    sampling: Sampling
    visual: Mapping[str, np.ndarray] = field(default_factory=dict)
    adapter: str | None = None


class Event(NamedTuple):
    """A token of an answer, or its end.

    Attributes:
        token_id: None if the answer ends without a further token, as a cancelled one.
        logprob: of the token, if asked for.
        top_logprobs: (token id, log-probability) of the most likely ones, if asked for.
        finish_reason: of the last event: "stop" by a stop token, which is this event's, "length" or
            "cancelled"; else None.
    """

    token_id: int | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None


class EngineFull(Exception):  # noqa: N818 - no error of the engine or its user
    """Too much waits already.

    Attributes:
        retry_after: seconds after which to ask again.
    """

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class EngineSettings:
    """Bounds; names as in vLLM where it has them.

    Attributes:
        max_num_seqs: prompts and answers that run at once.
        max_num_batched_tokens: tokens of prompts in a step; longer prompts take several.
        kv_cache_tokens: tokens whose keys and values there is memory for, which is allocated at the
            start.
        block_size: tokens of a block of that memory.
        max_waiting_tokens: tokens of requests that wait, prompts and answers; more are refused.
        image_cache_bytes: encoded images and videos that are kept.
        batch_invariant: every step of answers runs `max_num_seqs` rows, rounded up to 16, so that
            no bit of a result depends on what else runs; few answers become slower.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    kv_cache_tokens: int = 16384
    block_size: int = 16
    max_waiting_tokens: int = 1 << 18
    image_cache_bytes: int = 1 << 28
    batch_invariant: bool = False

    def __post_init__(self):
        for name, least in (
            *(("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("block_size", 1)),
            *(("kv_cache_tokens", self.block_size), ("max_waiting_tokens", 0)),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least {least}")


class Handle:
    """A submitted request: iterate over its events from one thread or one event loop."""

    def __init__(self, wake: Callable[[], None]):
        self._events: SimpleQueue[Event | Exception] = SimpleQueue()
        self._wake, self._notify = wake, threading.Event().set
        self.is_cancelled = False

    def __iter__(self) -> Iterator[Event]:
        """The events as they come; a RuntimeError if the model failed at this request."""
        while True:
            event = self._checked(self._events.get())
            yield event
            if event.finish_reason:
                return

    async def __aiter__(self) -> AsyncIterator[Event]:
        """The same, in an event loop, which is not blocked."""
        loop, has_come = asyncio.get_running_loop(), asyncio.Event()
        self._notify = lambda: loop.call_soon_threadsafe(has_come.set)
        while True:
            while not self._events.empty():
                event = self._checked(self._events.get())
                yield event
                if event.finish_reason:
                    return
            await has_come.wait()
            has_come.clear()

    def cancel(self) -> None:
        """End the answer before the next step, with a last event "cancelled"; from any thread."""
        self.is_cancelled = True
        self._wake()

    def put(self, event: Event | Exception) -> None:
        """Called by the engine."""
        self._events.put(event)
        try:
            self._notify()
        except RuntimeError:  # The event loop of a client that has left is closed.
            logger.debug("an event has no reader")

    def _checked(self, event: Event | Exception) -> Event:
        if isinstance(event, Exception):
            raise RuntimeError(f"the model failed at this request: {event}") from event
        return event


class _Sequence:
    """A request in the engine.

    Attributes:
        most: places that prompt and answer may take; the last token's key is never needed.
        blocks, places, row: its memory, while it runs.
        done: tokens of the prompt that have run.
    """

    def __init__(self, request: Request, prompt: Any, handle: Handle):
        self.prompt, self.handle, self.adapter = prompt, handle, request.adapter
        self.answer = AnswerRow(request.sampling, prompt.ids_1L[0])
        self.most = prompt.length + request.sampling.max_tokens - 1
        self.blocks: list[int] = []
        self.places, self.row, self.done = np.zeros(0, np.int64), -1, 0
        self.has_ended = False


class Engine:
    """
    Args:
        model: a complete vision-language model, or an exported one, whose rows run one by one;
            nothing else runs it from now on.
        adapters: LoRA folders in PEFT's format by the names that requests have for them.

    Raises:
        ValueError: a model or an adapter that is not for an engine.
    """

    def __init__(
        self,
        model: Any,
        settings: EngineSettings | None = None,
        adapters: Mapping[str, Path] | None = None,
    ):
        self.settings = own = settings or EngineSettings()
        num_blocks = own.kv_cache_tokens // own.block_size
        self._model: Any
        if isinstance(model, ExportedQwen3VL):
            if adapters:
                raise ValueError("an export has no adapters: merge them (paddle-vl merge), export")
            self._model = ExportedRows(model, num_blocks, own.block_size)
        else:
            self._model = BatchedModel(
                model, own.max_num_seqs, own.block_size, num_blocks, own.image_cache_bytes,
                adapters or {},
            )  # fmt: skip
        self._changed = threading.Condition()
        # Behind the lock: what other threads change.
        self._waiting: deque[_Sequence] = deque()
        self._end: float | None = None
        self._changes: deque[tuple[Callable[[Any], None], Future[None]]] = deque()
        # Of the model's thread.
        self._running: list[_Sequence] = []
        self._free_blocks = list(range(self._model.num_blocks))[::-1]
        self._free_rows = list(range(own.max_num_seqs))[::-1]
        self._tokens_per_second = 0.0
        self._counts = dict.fromkeys(("prompt_tokens", "generated_tokens", "steps"), 0)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Run the model in a thread of its own from now on; if that fails itself, which no request
        can make it do, the process ends."""
        self._thread = Watch(self._run, "engine")
        self._thread.start()

    def submit(self, request: Request) -> Handle:
        """Queue a request; from any thread.

        Raises:
            EngineFull: too many tokens wait.
            ValueError: a request that can never run: an unknown adapter, ids or visual arrays that
                do not fit the model or each other, or more tokens than the memory has room for.
            RuntimeError: the engine is closed.
        """
        prompt = self._model.prompt(request.input_ids, request.visual, request.adapter)
        sequence = _Sequence(request, prompt, Handle(self._wake))
        room = self._model.num_blocks * self.settings.block_size
        if sequence.most > room:
            raise ValueError(
                f"the prompt has {prompt.length} tokens and max_tokens is "
                f"{request.sampling.max_tokens}, but there is memory for {room} tokens: ask for "
                "fewer, or raise kv_cache_tokens"
            )
        with self._changed:
            if self._end is not None:
                raise RuntimeError("the engine is closed")
            waiting = self._num_waiting()
            if waiting and waiting + sequence.most > self.settings.max_waiting_tokens:
                seconds = math.ceil(waiting / max(self._tokens_per_second, 1.0))
                raise EngineFull(
                    f"{waiting} tokens of earlier requests wait, and at most "
                    f"{self.settings.max_waiting_tokens} may",
                    min(max(seconds, 1), 60),
                )
            self._waiting.append(sequence)
            self._changed.notify()
        return sequence.handle

    def change(self, change: Callable[[Any], None]) -> None:
        """Change the model, a `BatchedModel`, in its thread, between what began before and what
        begins from now on; from any other thread, which waits for it.

        Raises:
            RuntimeError: the engine is closed. Else what the change raises.
        """
        done: Future[None] = Future()
        with self._changed:
            if self._end is not None:
                raise RuntimeError("the engine is closed")
            self._changes.append((change, done))
            self._changed.notify()
        done.result()

    def close(self, seconds: float = 0.0) -> None:
        """Take no more requests, let those that there are end within this time, and cancel the
        rest; returns when the thread has ended."""
        with self._changed:
            self._end = time.monotonic() + seconds
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def stats(self) -> dict[str, float]:
        """Numbers for metrics, from any thread: how many requests run and wait, and of how many
        tokens; blocks of memory; encoded images; and counts since the start."""
        model = self._model
        with self._changed:
            waiting, waiting_tokens = len(self._waiting), self._num_waiting()
        return {
            "running": len(self._running),
            "waiting": waiting,
            "waiting_tokens": waiting_tokens,
            "kv_blocks_used": model.num_blocks - len(self._free_blocks),
            "kv_blocks_total": model.num_blocks,
            "image_cache_bytes": model.kept_bytes,
            "image_cache_hits": model.image_hits,
            "image_cache_misses": model.image_misses,
            **self._counts,
        }

    def _num_waiting(self) -> int:
        return sum(each.most for each in self._waiting)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        self._model.use_thread()
        while True:
            timeout: float | None = _IDLE_S
            with self._changed:
                while self._is_idle and self._end is None:
                    if not self._changed.wait(timeout):
                        release_free_memory()
                        timeout = None
                self._leave()
                self._join()
                if self._is_idle and self._end is not None:
                    return
            while self._changes and not self._running:
                self._make(*self._changes.popleft())
            begin, before = time.monotonic(), self._num_tokens
            self._prefill()
            self._advance()
            self._counts["steps"] += 1
            rate = (self._num_tokens - before) / max(time.monotonic() - begin, 1e-6)
            share = _SMOOTHING if self._tokens_per_second else 1.0
            self._tokens_per_second += share * (rate - self._tokens_per_second)

    @property
    def _is_idle(self) -> bool:
        return not (self._waiting or self._running or self._changes)

    def _make(self, change: Callable[[Any], None], done: "Future[None]") -> None:
        try:
            change(self._model)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _leave(self) -> None:
        """End what is cancelled, and everything when the time of `close` is over."""
        is_over = self._end is not None and time.monotonic() >= self._end
        for each in [*self._running, *self._waiting]:
            if is_over or each.handle.is_cancelled:
                self._finish(each, Event(None, finish_reason="cancelled"))
        self._waiting = deque(each for each in self._waiting if not each.has_ended)

    def _join(self) -> None:
        """Give the requests that have waited longest rows and blocks, as long as there are any."""
        while self._waiting and self._free_rows and not self._changes:
            count = -(-self._waiting[0].most // self.settings.block_size)
            if count > len(self._free_blocks):
                return
            sequence = self._waiting.popleft()
            sequence.blocks = [self._free_blocks.pop() for _ in range(count)]
            sequence.places = self._model.places_of(sequence.blocks)
            sequence.row = self._free_rows.pop()
            self._running.append(sequence)

    def _prefill(self) -> None:
        """Run parts of the oldest prompts; their borders depend on the prompt alone."""
        size = left = self.settings.max_num_batched_tokens
        for each in [each for each in self._running if each.done < each.prompt.length]:
            while each.done < each.prompt.length and not each.has_ended:
                end = min(each.done + size, each.prompt.length)
                left -= end - each.done
                if left < 0:
                    return
                try:
                    logits_1V = self._model.prefill(
                        each.prompt, each.done, end, each.row, each.places
                    )
                    self._counts["prompt_tokens"] += end - each.done
                    each.done = end
                    if logits_1V is not None:
                        self._choose(logits_1V, [each])
                except Exception as error:
                    self._finish(each, error)

    def _advance(self) -> None:
        """Append a token to every answer that has begun."""
        rows = [each for each in self._running if each.answer.ids]
        if not rows:
            return
        # How many tokens have keys, with the one whose keys come now.
        counts = [each.prompt.length + len(each.answer.ids) for each in rows]
        positions = [each.prompt.next_position + len(each.answer.ids) - 1 for each in rows]
        try:
            logits_RV = self._model.advance(
                [each.answer.ids[-1] for each in rows],
                positions,
                [each.row for each in rows],
                [each.places[:count] for each, count in zip(rows, counts, strict=True)],
                [each.adapter for each in rows],
                self.settings.batch_invariant,
            )
            self._choose(logits_RV, rows)
        except Exception as error:
            for each in rows:
                self._finish(each, error)

    def _choose(self, logits_RV: Any, rows: list[_Sequence]) -> None:
        """Choose the rows' next tokens; an answer whose `allowed` fails ends by that."""
        masks = []
        for each in rows:
            allowed, mask = each.answer.sampling.allowed, None
            try:
                mask = None if allowed is None else allowed(each.answer.ids)
                if mask is not None and not np.any(mask):
                    raise ValueError("the grammar allows no token")
            except Exception as error:
                mask = None
                self._finish(each, error)
            masks.append(mask)
        choices = choose_tokens(logits_RV, [each.answer for each in rows], masks)
        for each, choice in zip(rows, choices, strict=True):
            if not each.has_ended:
                self._append(each, choice)

    def _append(self, sequence: _Sequence, choice: ChosenToken) -> None:
        answer = sequence.answer
        answer.append(choice.token_id)
        self._counts["generated_tokens"] += 1
        reason = None
        if choice.token_id in answer.sampling.stop_token_ids:
            reason = "stop"
        elif len(answer.ids) == answer.sampling.max_tokens:
            reason = "length"
        event = Event(*choice, reason)
        if reason is None:
            sequence.handle.put(event)
        else:
            self._finish(sequence, event)

    def _finish(self, sequence: _Sequence, event: Event | Exception) -> None:
        """Send the last event, and take the request's memory back."""
        if sequence.has_ended:
            return
        if isinstance(event, Exception):
            logger.error("a request failed", exc_info=event)
        sequence.has_ended = True
        if sequence.row >= 0:
            self._running.remove(sequence)
            self._free_rows.append(sequence.row)
            self._free_blocks += sequence.blocks
        sequence.prompt.columns = None
        sequence.handle.put(event)

    @property
    def _num_tokens(self) -> int:
        return self._counts["prompt_tokens"] + self._counts["generated_tokens"]
