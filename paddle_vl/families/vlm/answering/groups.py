"""Groups of sampled answers: several to each prompt, which runs once, as do its images.

The answers share the keys of their prompt; each has memory for its own. Groups begin in their order
as rows and memory become free. A `GroupSampler` is for one state of the weights: it keeps no images
or keys of before, and its memory goes with it.

Shapes: L prompt length, C tokens of an answer.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from paddle import Tensor

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.batch.schema import VLBatch
from paddle_vl.families.vlm.answering.questions import PromptBatches
from paddle_vl.families.vlm.inputs.collate import VISUAL_KEYS, VLCollator, prepared
from paddle_vl.families.vlm.inputs.preference import Answer, PreferenceCollator
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.generation.sampling import AnswerRow, ChosenToken, Sampling, choose_tokens

_BLOCK = 16
# Columns of a prompt that run at once.
_CHUNK = 4096
# Of encoded images that prompts of a sampler share.
_IMAGE_BYTES = 1 << 28


class Sampled(NamedTuple):
    """A sampled answer.

    Attributes:
        ids: `[C]` int64, the end token too.
        log_probs: `[C]` float32, of the scores that each token was drawn from.
        is_truncated: whether no end token was drawn.
    """

    ids: np.ndarray
    log_probs: np.ndarray
    is_truncated: bool


@dataclass(eq=False)
class _Group:
    prompt: Any
    rows: list[AnswerRow]
    blocks: list[int] = field(default_factory=list)
    num_running: int = 0


@dataclass(eq=False)
class _Row:
    group: _Group
    answer: AnswerRow
    number: int
    blocks: list[int]
    places: np.ndarray
    log_probs: list[float] = field(default_factory=list)


def _blocks_for(tokens: int) -> int:
    return -(-tokens // _BLOCK)


class GroupBatches(PromptBatches):
    """Batches whose rows are prompts, several times each, for a model that is split over ranks.

    Args:
        own_rows: makes of a batch this rank's; None where they do not differ.
        vision: a tower's configuration, to lay out the patches.
    """

    def __init__(
        self,
        model: Any,
        processor: VLProcessor,
        collator: VLCollator,
        max_new_tokens: int,
        ends: Sequence[int],
        own_rows: Callable[[Any], Any] | None,
        vision: Any,
    ):
        super().__init__(model, processor, collator, max_new_tokens, ends, "returns_scores")
        self._own_rows, self._vision = own_rows, vision

    def batch(self, prompts: Sequence[Mapping[str, np.ndarray]]) -> VLBatch:
        """Some rows; equal prompts, which are one object, share their images."""
        collator = PreferenceCollator(self._collator.collator)
        missing = -len(prompts) % self._collator.collator.num_parts or int(not prompts)
        rows = [*prompts, *[self._collator.filler] * missing]
        owners = dict[int, int]()
        answers = list[Answer]()
        for number, each in enumerate(rows):
            labels_L = np.full_like(each["input_ids"], IGNORE_INDEX)
            grids = {key: each[key] for key in VISUAL_KEYS if "grid" in key and key in each}
            owner = owners.setdefault(id(each), number)
            sample = {"input_ids": each["input_ids"], "labels": labels_L, **grids}
            answers.append(Answer(sample, True, owner))
        visual = {
            number: {key: rows[number][key] for key in VISUAL_KEYS if key in rows[number]}
            for number in owners.values()
        }
        batch = collator.collated(answers, [[number] for number in range(len(rows))])
        del batch["label_branches"]
        pixels = {number: each for number, each in visual.items() if each}
        batch |= collator.shared_visual(batch, answers, pixels)
        found = prepared({**batch, "numbers": [*range(len(prompts))]}, self._vision)
        return found if self._own_rows is None else self._own_rows(found)


class SplitRow:
    """An answer that grows by the passes of a split model."""

    def __init__(self, prompt: Mapping[str, np.ndarray], sampling: Sampling, copy: int):
        self.prompt, self._log_probs = prompt, list[float]()
        self.answer = AnswerRow(sampling, prompt["input_ids"], copy)

    def append(self, token_id: int, log_prob: float) -> None:
        """Add a token that was chosen."""
        self.answer.append(token_id)
        self._log_probs.append(log_prob)

    def sampled(self) -> Sampled:
        """Up to the end token; rows go on until all have ended."""
        stops, ids = self.answer.sampling.stop_token_ids, self.answer.ids
        end = next((place for place, token in enumerate(ids, start=1) if token in stops), None)
        log_probs = np.array(self._log_probs[:end], np.float32)
        return Sampled(np.array(ids[:end], np.int64), log_probs, end is None)


def chosen_for(scores_BV: Tensor, rows: Sequence[SplitRow]) -> np.ndarray:
    """The next tokens of the first rows, and their log-probabilities: `[2, rows]`."""
    chosen = choose_tokens(scores_BV, [row.answer for row in rows])
    return np.transpose([[each.token_id, each.logprob or 0.0] for each in chosen])


class GroupSampler:
    """
    Args:
        model: a complete one, in evaluation mode from now on.
        prompts: the arrays of each prompt, as of `Prompts`.
        samplings: of all answers to each prompt, as many as it gets.
        max_rows: answers that run at once; a group needs as many as it has.

    Raises:
        ValueError: see `BatchedModel`; or a group is larger than `max_rows`.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Mapping[str, np.ndarray]],
        samplings: Sequence[Sequence[Sampling]],
        max_rows: int,
    ):
        most = max(map(len, samplings))
        if most > max_rows:
            raise ValueError(f"{most} answers to a prompt do not fit {max_rows} rows")
        needed = []
        for arrays, group in zip(prompts, samplings, strict=True):
            own = sum(_blocks_for(each.max_tokens - 1) for each in group)
            needed.append(_blocks_for(len(arrays["input_ids"])) + own)
        at_once = max(1, max_rows // min(map(len, samplings)))
        num_blocks = sum(sorted(needed)[-at_once:])
        # Runs that sample nothing load no code of answers.
        from paddle_vl.families.vlm.answering.batched import BatchedModel

        self._model = BatchedModel(model, max_rows, _BLOCK, num_blocks, _IMAGE_BYTES, None)
        self._free_blocks = list(range(num_blocks))[::-1]
        self._free_rows = list(range(max_rows))[::-1]
        self._groups = [
            _Group(
                self._model.prompt(arrays["input_ids"], arrays, None),
                [AnswerRow(each, arrays["input_ids"], n) for n, each in enumerate(group)],
            )
            for arrays, group in zip(prompts, samplings, strict=True)
        ]

    def run(self) -> list[list[Sampled]]:
        """The answers to each prompt."""
        waiting, running = deque(self._groups), list[_Row]()
        found = dict[int, Sampled]()
        while waiting or running:
            while waiting and self._has_room(waiting[0]):
                running += self._begun(waiting.popleft())
                running = self._left(running, found)
            assert running or not waiting, "there is memory for any group alone"
            if running:
                self._advance(running)
                running = self._left(running, found)
        return [[found[id(row)] for row in group.rows] for group in self._groups]

    def _has_room(self, group: _Group) -> bool:
        needed = _blocks_for(group.prompt.length)
        needed += sum(_blocks_for(row.sampling.max_tokens - 1) for row in group.rows)
        return len(self._free_rows) >= len(group.rows) and len(self._free_blocks) >= needed

    def _taken(self, count: int) -> list[int]:
        return [self._free_blocks.pop() for _ in range(count)]

    def _begun(self, group: _Group) -> list[_Row]:
        """The group's rows with their first tokens."""
        model, prompt, logits_1V = self._model, group.prompt, None
        group.blocks = self._taken(_blocks_for(prompt.length))
        shared = model.places_of(group.blocks)[: prompt.length]
        numbers = [self._free_rows.pop() for _ in group.rows]
        for begin in range(0, prompt.length, _CHUNK):
            end = min(begin + _CHUNK, prompt.length)
            logits_1V = model.prefill(prompt, begin, end, numbers[0], shared)
        assert logits_1V is not None, "a prompt is not empty"
        if others := numbers[1:]:
            model.fork(numbers[0], others)
        group.num_running = len(numbers)
        rows = []
        for number, answer in zip(numbers, group.rows, strict=True):
            blocks = self._taken(_blocks_for(answer.sampling.max_tokens - 1))
            places = np.concatenate([shared, model.places_of(blocks)])
            rows.append(_Row(group, answer, number, blocks, places))
        logits_RV = logits_1V.expand([len(rows), logits_1V.shape[1]])
        self._append(rows, choose_tokens(logits_RV, group.rows))
        return rows

    def _advance(self, rows: Sequence[_Row]) -> None:
        lengths = [each.group.prompt.length + len(each.answer.ids) for each in rows]
        logits_RV = self._model.advance(
            [each.answer.ids[-1] for each in rows],
            [each.group.prompt.next_position + len(each.answer.ids) - 1 for each in rows],
            [each.number for each in rows],
            [each.places[:count] for each, count in zip(rows, lengths, strict=True)],
            [None] * len(rows),
            False,
        )
        self._append(rows, choose_tokens(logits_RV, [each.answer for each in rows]))

    @staticmethod
    def _append(rows: Sequence[_Row], chosen: Sequence[ChosenToken]) -> None:
        for row, choice in zip(rows, chosen, strict=True):
            row.answer.append(choice.token_id)
            row.log_probs.append(np.nan if choice.logprob is None else choice.logprob)

    def _left(self, rows: list[_Row], found: dict[int, Sampled]) -> list[_Row]:
        """The rows that go on; those that ended give their memory back."""
        going_on = []
        for row in rows:
            ids, sampling = row.answer.ids, row.answer.sampling
            has_end = ids[-1] in sampling.stop_token_ids
            if not has_end and len(ids) < sampling.max_tokens:
                going_on.append(row)
                continue
            log_probs = np.array(row.log_probs, np.float32)
            found[id(row.answer)] = Sampled(np.array(ids, np.int64), log_probs, not has_end)
            self._free_rows.append(row.number)
            self._free_blocks += row.blocks
            row.group.num_running -= 1
            if not row.group.num_running:
                self._free_blocks += row.group.blocks
        return going_on
