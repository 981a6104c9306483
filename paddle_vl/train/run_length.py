"""The length of a run, in steps or in tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunLength:
    """How long a run trains: a number of steps, or (train.max_tokens) of tokens.

    A run of tokens ends with the first step after which the tokens of all ranks, visual ones
    included and padding not, are at least as many. Its learning rate follows the tokens.
    """

    steps: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        assert (self.steps is None) != (self.tokens is None), "a run has one length"

    def is_reached(self, step: int, tokens: int) -> bool:
        """Whether the run is over after `step` steps with `tokens` tokens."""
        done, total = self.place(step, tokens)
        return done >= total

    def place(self, step: int, tokens: int) -> tuple[int, int]:
        """What is done and the whole length, both in the unit of the length."""
        if self.steps is not None:
            return step, self.steps
        assert self.tokens is not None
        return tokens, self.tokens


def restored_tokens(state: Mapping[str, Any], length: RunLength, checkpoint: Path) -> int:
    """Tokens that the run of a checkpoint has trained on; 0 if the checkpoint does not say so.

    Args:
        state: the trainer's.

    Raises:
        ValueError: it does not, and the run's length is in tokens.
    """
    if "tokens" not in state and length.tokens is not None:
        raise ValueError(
            f"train.max_tokens is set, and {checkpoint}, of an earlier version, does not say how "
            "many tokens it has trained on: set train.max_steps in its place"
        )
    return state.get("tokens", 0)
