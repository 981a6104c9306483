"""The planner's greedy writing: the next memory, then the next subtask, as tokens and as texts.

NumPy only; what reads the tokens is the model, or its exported programs. Shapes: B batch, n new
tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from paddle_vl.families.policy.prompt import PromptTokenizer

BOS = "<bos>"


class TokenReader(Protocol):
    """A model that has read a prompt and the tokens written so far."""

    def read(self, ids_Bn: np.ndarray, is_real_Bn: np.ndarray) -> None:
        """Append tokens int64, of which some are padding; each sees all real ones before it."""
        ...

    def next_tokens(self) -> np.ndarray:
        """The likeliest token after them, int64 `[B, 1]`."""
        ...


class WritingRules(NamedTuple):
    """Lengths and token ids of a plan.

    Attributes:
        memory_length, response_length: tokens of each segment, padding among them.
        response_label: ids of the label before the response.
    """

    memory_length: int
    response_length: int
    response_label: Sequence[int]
    bos_id: int
    eos_id: int
    pad_id: int

    @property
    def num_tokens(self) -> int:
        """All tokens that are read after the prompt."""
        return self.memory_length + len(self.response_label) + self.response_length


def write_plan(
    reader: TokenReader, batch_size: int, rules: WritingRules
) -> tuple[np.ndarray, np.ndarray]:
    """Memory and response, each int64 `[B, length]`: BOS, the text, EOS, padding."""
    memory = _written(reader, batch_size, rules.memory_length, rules)
    label_Bn = np.tile(np.array(rules.response_label, dtype=np.int64), (batch_size, 1))
    reader.read(label_Bn, np.ones(label_Bn.shape, dtype=bool))
    return memory, _written(reader, batch_size, rules.response_length, rules)


def _written(reader: TokenReader, batch_size: int, length: int, rules: WritingRules) -> np.ndarray:
    tokens = np.full((batch_size, 1), rules.bos_id, dtype=np.int64)
    reader.read(tokens, np.ones((batch_size, 1), dtype=bool))
    while tokens.shape[1] < length:
        token = reader.next_tokens()
        # Not after BOS alone: the first token after it is always decoded.
        ended = np.isin(tokens, (rules.eos_id, rules.pad_id)).any(axis=1, keepdims=True)
        ended &= tokens.shape[1] > 1
        token = np.where(ended, rules.pad_id, token)
        tokens = np.concatenate([tokens, token], axis=1)
        reader.read(token, np.asarray(~ended))
    return tokens


class Plan(NamedTuple):
    """The planner's texts, one per sample.

    Attributes:
        memory: the next step's `past_memory`.
        response: the next subtask, the low-level policy's `response`.
    """

    memory: list[str]
    response: list[str]


def plan_of(written: Sequence[np.ndarray], tokenizer: PromptTokenizer, eos_id: int) -> Plan:
    """The texts of memory and response, before their first EOS or padding."""

    def text(ids: np.ndarray) -> str:
        end = np.flatnonzero((ids == eos_id) | (ids == tokenizer.pad_id))
        return tokenizer.decode(ids[: end[0] if end.size else None])

    return Plan(*([text(row) for row in ids_Bn] for ids_Bn in written))
