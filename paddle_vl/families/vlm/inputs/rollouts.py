"""Answers that a policy has sampled, as batches to learn from.

The answers to a prompt share its images, which are in a micro-batch once.

Shapes: S answers, N learned tokens; B, L as in `paddle_vl.batch.schema`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import numpy as np

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.batch.schema import Array, Axes, VLBatch
from paddle_vl.families.vlm.inputs.collate import VISUAL_KEYS
from paddle_vl.families.vlm.inputs.preference import Answer, PreferenceCollator

SAMPLER, OLD, REFERENCE = "sampler_log_probs", "old_log_probs", "reference_log_probs"
_GRIDS = ("image_grid_thw", "video_grid_thw")


@dataclass(frozen=True, eq=False)
class Rollout:
    """An answer that was sampled, its ids as they were drawn.

    Attributes:
        prompt: input_ids `[L]` of the prompt, and its pixels and grids, as
            `SampleEncoder.encode_sample` gives them; one object for all answers to it.
        completion_ids: `[C]` int64, with the end token where there is one.
        advantage: of the answer.
        is_learned: `[C]`, 0 where a tool or a user wrote, or nothing of the answer is learned; None
            for all.
        log_probs: `[C]` float32 each, under the names of a batch's fields: of the sampler, with NaN
            where it gave none, of the policy that answered and of the reference.
    """

    prompt: Mapping[str, np.ndarray]
    completion_ids: np.ndarray
    advantage: float
    is_learned: np.ndarray | None = None
    log_probs: Mapping[str, np.ndarray] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutBatch(VLBatch):
    """Sampled answers, the samples of a batch that gives log-probabilities."""

    # Number of the answer that each target token belongs to, and learned tokens of each answer.
    target_branches: Annotated[Array, Axes("N", "int64")] = None
    answer_lengths: Annotated[Array, Axes("S", "float32")] = None
    advantages: Annotated[Array, Axes("S", "float32")] = None
    # 1 or 0: whether the answer was sampled.
    is_real: Annotated[Array, Axes("S", "float32")] = None
    # Log-probabilities of the targets. From the rollouts, or from the passes before a step.
    sampler_log_probs: Annotated[Array, Axes("N", "float32")] = None
    old_log_probs: Annotated[Array, Axes("N", "float32")] = None
    reference_log_probs: Annotated[Array, Axes("N", "float32")] = None


@dataclass(frozen=True)
class RolloutCollator(PreferenceCollator):
    """Collates rollouts; those of one prompt in a micro-batch share its images.

    Attributes:
        temperature: of sampling.
        max_completion_length: longest answer, for losses that are divided by it.
    """

    temperature: float = 1.0
    max_completion_length: int = 1

    def __call__(self, rows: Sequence[Rollout]) -> dict[str, Any]:
        """See `PreferenceCollator`; the fields of `RolloutBatch`.

        Raises:
            ValueError: an answer is empty or too long, or has a placeholder of an image or video.
        """
        owners: dict[int, int] = {}
        answers: list[Answer] = []
        pixels: dict[int, Mapping[str, np.ndarray]] = {}
        for number, rollout in enumerate(rows):
            self._check(number, rollout)
            owner = owners.setdefault(id(rollout.prompt), number)
            answers.append(Answer(_sample(rollout), True, owner))
            visual = {key: rollout.prompt[key] for key in VISUAL_KEYS if key in rollout.prompt}
            if owner == number and visual:
                pixels[number] = visual
        batch = self.collated(answers, [[number] for number in range(len(answers))])
        batch |= self.shared_visual(batch, answers, pixels)
        batch |= {"returns_log_probs": True, "temperature": self.temperature}
        lengths_S = [int(_learned(rollout).sum()) for rollout in rows]
        batch |= _row_fields(lengths_S, [each.advantage for each in rows])
        batch["num_row_places"] = len(rows) * self.max_completion_length
        given = [rollout.log_probs or {} for rollout in rows]
        for name in (SAMPLER, OLD, REFERENCE):
            if any(name in each for each in given):
                parts = [
                    each[name][_learned(rollout)] for each, rollout in zip(given, rows, strict=True)
                ]
                values_N = np.concatenate(parts).astype(np.float32)
                # A batch without targets has one token that stands for none.
                batch[name] = values_N if len(values_N) else np.zeros(1, np.float32)
        return batch

    def _check(self, number: int, rollout: Rollout) -> None:
        assert isinstance(rollout, Rollout), "prompts are answered before they are collated"
        ids_C = rollout.completion_ids
        if not 0 < len(ids_C) <= self.max_completion_length:
            raise ValueError(
                f"answer {number} has {len(ids_C)} tokens: there must be 1 to "
                f"{self.max_completion_length} (grpo.max_completion_length)"
            )
        collator = self.collator
        media = np.isin(ids_C, [collator.image_token_id, collator.video_token_id])
        if media.any():
            raise ValueError(
                f"token {int(media.argmax())} of answer {number} is the placeholder of an image or "
                "video, which stands for no pixels in an answer: suppress it when sampling"
            )


def _learned(rollout: Rollout) -> np.ndarray:
    """`[C]` bool."""
    given = rollout.is_learned
    return np.ones(len(rollout.completion_ids), bool) if given is None else given.astype(bool)


def _sample(rollout: Rollout) -> dict[str, np.ndarray]:
    prompt_ids, ids_C = rollout.prompt["input_ids"], rollout.completion_ids
    labels_C = np.where(_learned(rollout), ids_C, IGNORE_INDEX)
    sample = {
        "input_ids": np.concatenate([prompt_ids, ids_C]),
        "labels": np.concatenate([np.full_like(prompt_ids, IGNORE_INDEX), labels_C]),
    }
    return sample | {key: rollout.prompt[key] for key in _GRIDS if key in rollout.prompt}


def _row_fields(lengths: Sequence[int], advantages: Sequence[float]) -> dict[str, Any]:
    """The values of each answer; of a batch without any those of one that does not count."""
    is_real = bool(len(lengths))
    lengths_S = np.asarray(lengths if is_real else [0], np.float32)
    learned = int((lengths_S > 0).sum())
    return {
        "answer_lengths": lengths_S,
        "advantages": np.asarray(advantages if is_real else [0.0], np.float32),
        "is_real": np.full(len(lengths_S), is_real, np.float32),
        "num_samples": len(lengths),
        "num_rows": len(lengths),
        "num_learned_rows": learned,
        "num_batches": int(is_real),
        "num_learned_batches": int(learned > 0),
    }


def without_rollouts(idle: VLBatch) -> RolloutBatch:
    """A batch without targets as one of an answer that does not count."""
    zeros_N = np.zeros_like(idle.target_rows[0])
    names = {each.name for each in fields(RolloutBatch)}
    of_rows = {name: value for name, value in _row_fields([], []).items() if name in names}
    log_probs = dict.fromkeys((SAMPLER, OLD, REFERENCE), zeros_N.astype(np.float32))
    own = {"target_branches": zeros_N, "returns_log_probs": True}
    given: dict[str, Any] = vars(idle) | of_rows | own | log_probs
    return RolloutBatch(**given)
