"""Questions that a run answers in its evaluations: conversations of data.eval up to a target turn.

Shapes: B prompts, L padded length, S keys so far.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.batch.schema import VLBatch
from paddle_vl.config.families import FamilyEntry
from paddle_vl.data.jsonl import BadSampleError, OnBadSample, sample_at
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.base import RankInfo
from paddle_vl.families.vlm.evaluation.scorer import (
    Question,
    Scorer,
    answer_to,
    expected_answer,
    questions_in,
)
from paddle_vl.families.vlm.inputs.collate import VLCollator, prepared
from paddle_vl.families.vlm.inputs.dataset import ConversationData
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.settings import EvalConfig

logger = logging.getLogger(__name__)


@dataclass
class QuestionPrompts:
    """A `paddle_vl.data.samples.SampleSource` of prompts."""

    questions: Sequence[Question]
    on_bad_sample: OnBadSample
    skipped: Counter[str] = field(default_factory=Counter)
    fingerprint: int = 0

    def __len__(self) -> int:
        return len(self.questions)

    def place(self, number: int) -> str:
        return self.questions[number].sample

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        question = self.questions[number]
        with sample_at(partial(self.place, number)):
            prompt = question.processor.encode_prompts(
                [question.prompt], add_generation_prompt=True
            )
        ids_L = prompt.pop("input_ids")[0]
        del prompt["attention_mask"]
        ignored_L = np.full_like(ids_L, IGNORE_INDEX)
        return {"input_ids": ids_L, "labels": ignored_L, "number": np.array(number), **prompt}


@dataclass(frozen=True)
class PromptCollator:
    """Batches of prompts, padded on the left, whose rows the model-parallel ranks divide.

    Attributes:
        collator: of samples.
    """

    collator: VLCollator

    def __call__(self, samples: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
        missing = -len(samples) % self.collator.num_parts
        rows = [*samples, *[self.filler] * missing]
        numbers = [int(each["number"]) for each in samples if "number" in each]
        return {**self.collator(rows), "numbers": numbers}

    @property
    def filler(self) -> dict[str, np.ndarray]:
        """A prompt that nobody asks."""
        ids_L = np.array([self.collator.pad_token_id])
        return {"input_ids": ids_L, "labels": np.full_like(ids_L, IGNORE_INDEX)}


class PromptBatches:
    """Batches of prompts with caches, and of the tokens that follow, one by one.

    Attributes:
        ends: tokens that end an answer.
        max_new_tokens: longest answer.

    Args:
        model: that answers.
        collator: of training samples.
        wanted: what a batch asks the model for.
    """

    def __init__(
        self,
        model: Any,
        processor: VLProcessor,
        collator: VLCollator,
        max_new_tokens: int,
        ends: Sequence[int],
        wanted: str = "returns_choices",
    ):
        self.model, self.processor = model, processor
        self.ends, self.max_new_tokens, self._wanted = [*ends], max_new_tokens, wanted
        self._collator = PromptCollator(
            replace(collator, padding_side="left", pad_to_multiple_of=1)
        )

    def idle_batch(self) -> VLBatch:
        """A batch without numbers, for a rank that has no prompt left."""
        return prepared(self._collator([self._collator.filler]))

    def begun(self, batch: VLBatch) -> VLBatch:
        """The batch as the model takes it, with caches; its output has `choices` `[B]`."""
        rows, length = batch.input_ids.shape
        caches = self.model.new_caches(length, length + self.max_new_tokens - 1)
        return batch | (self._asked(np.arange(1, rows + 1) * length - 1) | {"caches": caches})

    def continued(self, batch: VLBatch, tokens: np.ndarray) -> VLBatch:
        """What follows such a batch after one more token of each prompt."""
        mask_BS = batch.attention_mask
        # Rows that nobody asks are last.
        ids_B1 = np.full([len(mask_BS), 1], self.processor.pad_token_id, np.int64)
        ids_B1[: len(tokens), 0] = tokens
        follows: dict[str, Any] = {
            "input_ids": ids_B1,
            "attention_mask": np.concatenate([mask_BS, np.ones_like(ids_B1)], axis=1),
            # The last token of a prompt is text, whose position is the highest.
            "position_ids": batch.position_ids[:, :, -1:] + 1,
            "has_left_padding": batch.has_left_padding,
            "caches": batch.caches,
            **self._asked(np.arange(len(mask_BS))),
        }
        if batch.real_row_indices is not None:
            part = self.model.placement.ops.expert_part
            follows["real_row_indices"] = part.of_numbers(np.arange(len(mask_BS)), len(mask_BS))
            follows["num_real_rows"] = len(mask_BS)
        return VLBatch(**follows)

    def _asked(self, rows_B: np.ndarray) -> dict[str, Any]:
        """Ask for what follows some token rows."""
        targets = {"target_rows": np.stack([rows_B, np.zeros_like(rows_B)]), "num_target_tokens": 0}
        return {**targets, self._wanted: True}


class VLQuestions(PromptBatches):
    """Prompts whose answers an evaluation generates and scores, see `paddle_vl.train.answers`.

    Attributes:
        names: of the scores.

    Args:
        model: that answers.
        data: of data.eval.
        collator: of training samples.
        make_loader: `Family.loader`.
    """

    def __init__(
        self,
        model: Any,
        data: ConversationData,
        processor: VLProcessor,
        settings: EvalConfig,
        collator: VLCollator,
        make_loader: Any,
    ):
        most = settings.max_new_tokens
        super().__init__(model, processor, collator, most, processor.eos_token_ids)
        self.settings, self._make_loader = settings, make_loader
        self.questions: list[Question] = []
        count = len(data) if settings.num_samples is None else min(settings.num_samples, len(data))
        for place in range(count):
            # Evenly over the data.
            try:
                self.questions += questions_in(data, place * len(data) // count)
            except BadSampleError as error:
                if data.on_bad_sample == "fail":
                    raise
                logger.warning("train.eval does not ask a bad sample: %s", error)
        if not self.questions:
            raise ValueError("train.eval is set but no sample of data.eval that is asked is usable")
        self._scorer = Scorer(settings.metrics)
        # Of every reference, so that no metric fails in the middle of the run.
        self.names = [*self._scorer.by_source([*map(expected_answer, self.questions)])[0]]
        self._prompts = QuestionPrompts(self.questions, data.on_bad_sample)

    def __len__(self) -> int:
        return len(self.questions)

    def loader(self, ranks: RankInfo, batch_size: int) -> PrefetchLoader:
        """This rank's batches of prompts, with the `numbers` of the prompts of the first rows."""
        return self._make_loader(self._prompts, self._collator, ranks, batch_size)

    def scored(
        self, answers: Mapping[int, Sequence[int]]
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The scores by name, and a line of predictions.jsonl for each answer; ids by prompt."""
        texts = {number: self.processor.decode(ids) for number, ids in sorted(answers.items())}
        found = [answer_to(self.questions[number], text) for number, text in texts.items()]
        scores, answered = self._scorer.by_source(found)
        return scores, [answer.to_dict() for answer in answered]


def asked_questions(
    family: FamilyEntry, recipe: Any, model: Any, collator: VLCollator
) -> VLQuestions | None:
    """Those of a run's data.eval; None without train.eval."""
    if (settings := recipe.config.train.eval) is None:
        return None
    data, processor = recipe.eval_data, recipe.processor
    return VLQuestions(model, data, processor, settings, collator, recipe.loader)
