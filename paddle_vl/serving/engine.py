"""Continuous batching: requests join and leave a running batch of one model between its steps.

One thread runs the model. A step runs at most `max_num_batched_tokens` of prompts, then one token
of every running answer. Requests begin in the order of their arrival, when there are blocks of key
and value memory for prompt and answer; none overtakes another, and none is taken back.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Ids of the answer so far to the tokens that may follow, bool `[V]`; None for all.
Allowed = Callable[[list[int]], np.ndarray | None]


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen. Names as in OpenAI's and vLLM's interfaces.

    Attributes:
        max_tokens: the answer ends after so many.
        temperature: divides the scores; 0 takes the most likely token.
        top_k: sample among the k most likely; 0 among all.
        top_p: sample among the most likely that together have this probability.
        min_p: sample among those of at least this share of the highest probability.
        repetition_penalty: of tokens in prompt or answer, as in HF; 1 has no effect.
        presence_penalty, frequency_penalty: subtracted from the scores of tokens of the answer,
            once and as often as they occur; 0 has no effect.
        seed: of sampling; None for a different one each time.
        stop_token_ids: each ends the answer, as its last token.
        logprobs: give the log-probability of each token and this many of the most likely ones, of
            the scores before any rule; None for neither.
        allowed: called on the model's thread with the answer so far before each token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    allowed: Allowed | None = None


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


class EngineFull(Exception):
    """Too much waits already.

    Attributes:
        retry_after: seconds after which to ask again.
    """

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class EngineSettings:
    """Bounds; names as in vLLM.

    Attributes:
        max_num_seqs: answers that run at once.
        max_num_batched_tokens: tokens of prompts in a step; longer prompts take several.
        kv_cache_tokens: tokens with keys and values in memory, in all.
        block_size: tokens of a block of that memory.
        max_waiting_tokens: tokens of requests that wait, prompts and answers; more are refused.
        image_cache_bytes: encoded images and videos that are kept, in bytes.
        batch_invariant: every step runs `max_num_seqs` rows, so that no bit of a result depends on
            what else runs (except by experts); one answer alone becomes slower.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    kv_cache_tokens: int = 65536
    block_size: int = 16
    max_waiting_tokens: int = 1 << 20
    image_cache_bytes: int = 1 << 28
    batch_invariant: bool = False


class Handle:
    """A submitted request: iterate over its events from one thread or one event loop."""

    def __iter__(self) -> Iterator[Event]:
        """The events as they come; a RuntimeError if the model failed at this request."""
        raise NotImplementedError

    def __aiter__(self) -> AsyncIterator[Event]:
        """The same, in an event loop, which is not blocked."""
        raise NotImplementedError

    def cancel(self) -> None:
        """End the answer before the next step, with a last event "cancelled"; from any thread."""
        raise NotImplementedError


class Engine:
    """
    Args:
        model: a vision-language model, complete.
        adapters: LoRA folders in PEFT's format by the names that requests have for them.
    """

    def __init__(
        self,
        model: Any,
        settings: EngineSettings | None = None,
        adapters: Mapping[str, Path] | None = None,
    ):
        raise NotImplementedError

    def start(self) -> None:
        """Run the model in a thread of its own from now on."""
        raise NotImplementedError

    def submit(self, request: Request) -> Handle:
        """Queue a request; from any thread.

        Raises:
            EngineFull: too many tokens wait.
            ValueError: a request that can never run: a bad setting, an unknown adapter, visual
                tokens that do not fit the arrays, or more tokens than the memory or the model has
                room for.
            RuntimeError: the engine is closed.
        """
        raise NotImplementedError

    def close(self, seconds: float = 0.0) -> None:
        """Take no more requests, let those that there are end within this time, and cancel the
        rest; returns when the thread has ended."""
        raise NotImplementedError

    def stats(self) -> dict[str, float]:
        """Numbers for metrics: `running`, `waiting`, `waiting_tokens`, `kv_blocks_used`,
        `kv_blocks_total`, `image_cache_bytes`, `image_cache_hits`, `image_cache_misses`,
        `prompt_tokens`, `generated_tokens`, `steps`."""
        raise NotImplementedError
