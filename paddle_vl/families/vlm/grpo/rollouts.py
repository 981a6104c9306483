"""What a run that learns from rewards samples, scores and learns, see `paddle_vl.train.rollouts`.

Completions depend on the run's seed, the number of the prompt, the epoch and the number of the
copy, not on the ranks that sample them.

Shapes: S answers, G answers to a prompt, F rewards, C tokens of an answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.families.vlm.answering.groups import (
    GroupBatches,
    GroupSampler,
    Sampled,
    SplitRow,
    chosen_for,
)
from paddle_vl.families.vlm.grpo import window
from paddle_vl.families.vlm.grpo.advantages import advantages, total_rewards
from paddle_vl.families.vlm.grpo.endpoint import RolloutServer
from paddle_vl.families.vlm.grpo.metrics import check_sampler, completion_metrics, reward_metrics
from paddle_vl.families.vlm.grpo.objective import GAP_MEAN
from paddle_vl.families.vlm.grpo.rewards import Rewards, SampledAnswer
from paddle_vl.families.vlm.grpo.settings import FORMAT, GRPOConfig
from paddle_vl.families.vlm.grpo.window import Group, Sample
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.prompts import Prompts
from paddle_vl.families.vlm.inputs.rollouts import SAMPLER, Rollout
from paddle_vl.generation.sampling import Sampling


class Rollouts:
    """Samples answers to prompts, scores them, and makes batches of them.

    `described`, `groups_of` and so on are those of `grpo.window`.

    Args:
        prompts: of data.train.
        ends: tokens that end an answer.
        collate: makes this rank's batch of rollouts.
        batches: makes batches of prompts, for a model that is split over ranks.
        seed: of the run.
        base: folder that the paths of rewards are relative to.
        server: samples the answers in place of the model; None for none.

    Raises:
        ValueError: a reward that does not exist, or cannot be called.
    """

    def __init__(
        self,
        settings: GRPOConfig,
        prompts: Prompts,
        processor: VLProcessor,
        ends: Sequence[int],
        collate: Callable[[Sequence[Rollout]], Any],
        batches: GroupBatches,
        seed: int,
        base: Path | None = None,
        server: RolloutServer | None = None,
    ):
        self.settings, self.prompts, self.processor = settings, prompts, processor
        self.server = server
        self.collate, self.batches = collate, batches
        self.rewards, self._seed = Rewards(settings, base), seed
        self.size = settings.num_generations
        media = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        self._common = Sampling(
            max_tokens=settings.max_completion_length,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p or 0.0,
            repetition_penalty=settings.repetition_penalty,
            stop_token_ids=tuple(ends),
            # They stand for no pixels in an answer.
            suppress_tokens=tuple(sorted({getattr(processor, name) for name in media})),
            logprobs=0,
            logprobs_mode="processed_logprobs",
        )
        chosen = settings.outcome_rewards
        if chosen is None:
            chosen = [each for each in settings.rewards if not each.startswith(FORMAT)]
        chosen = chosen or settings.rewards
        self._outcomes = [settings.rewards.index(each) for each in chosen]

    described, groups_of = staticmethod(window.described), staticmethod(window.groups_of)
    arrays_of, restored = staticmethod(window.arrays_of), staticmethod(window.restored)
    told_answers = staticmethod(window.told_answers)
    told_sampled, sampled_of = staticmethod(window.told_sampled), staticmethod(window.sampled_of)

    def samplings(self, prompt: Sample) -> list[Sampling]:
        """Of each answer to a prompt; `AnswerRow` adds the number of the copy to the seed."""
        place = [self._seed, int(prompt["epoch"]), int(prompt["number"])]
        (seed,) = np.random.SeedSequence(place).generate_state(1, np.uint64)
        return [replace(self._common, seed=int(seed))] * self.size

    def split_rows(self, prompts: Sequence[Sample]) -> list[SplitRow]:
        """The answers to some prompts that a split model begins, group by group."""
        return [
            SplitRow(prompt, sampling, copy)
            for prompt in prompts
            for copy, sampling in enumerate(self.samplings(prompt))
        ]

    chosen_for = staticmethod(chosen_for)

    def sampled(self, model: Any, prompts: Sequence[Sample]) -> list[list[Sampled]]:
        """The answers of a complete model to some prompts, each with its images encoded once."""
        samplings = [self.samplings(each) for each in prompts]
        rows = min(self.settings.max_num_seqs, len(prompts) * self.size)
        return GroupSampler(model, prompts, samplings, rows).run()

    def asked(self, prompts: Sequence[Sample]) -> list[list[Sampled]]:
        """The same of the server."""
        assert self.server is not None, "asked where there is one"
        given = [
            (self.prompts.conversation(int(each["number"])).prompt, each["input_ids"])
            for each in prompts
        ]
        return self.server.sampled(given, [self.samplings(each) for each in prompts])

    def scored(
        self, prompts: Sequence[Sample], sampled: Sequence[Sequence[Sampled]], state: Any
    ) -> np.ndarray:
        """`[S, F]`, see `Rewards`."""
        answers = []
        for prompt, group in zip(prompts, sampled, strict=True):
            number = int(prompt["number"])
            row = self.prompts.conversation(number)
            for each in group:
                text = self.processor.decode(each.ids.tolist())
                answers.append(
                    SampledAnswer(
                        text, each.ids.tolist(), row.prompt.messages, row.columns, row.references,
                        number,
                    )
                )  # fmt: skip
        return self.rewards(answers, state)

    def has_signal(self, group: Group) -> bool:
        """Whether a group's answers differ in an outcome."""
        for column in self._outcomes:
            values = group.rewards[:, column]
            values = values[~np.isnan(values)]
            if len(values) and values.min() < values.max():
                return True
        return False

    def learn_from(self, groups: Sequence[Group], kl_S: np.ndarray | None = None) -> None:
        """Give the groups of a generation, of all ranks, their advantages."""
        rewards_SF = np.concatenate([each.rewards for each in groups])
        found_S = advantages(rewards_SF, self.settings, kl_S)
        for group, own_G in zip(groups, np.split(found_S, len(groups)), strict=True):
            group.advantages = own_G

    def is_idle(self, groups: Sequence[Group]) -> bool:
        """Whether nothing would be learned from these groups."""
        settings = self.settings
        if settings.entropy_coef or (settings.has_reference and not settings.kl_in_reward):
            return not groups
        return not any(np.any(each.advantages) for each in groups)

    def rows(self, group: Group) -> list[Rollout]:
        """The answers of an own group as rows to learn."""
        assert group.prompt is not None, "of an own group"
        assert group.answers is not None, "of an own group"
        assert group.advantages is not None, "after `learn_from`"
        found = []
        for place, answer in enumerate(group.answers):
            is_masked = answer.is_truncated and self.settings.mask_truncated_completions
            log_probs = {SAMPLER: answer.log_probs}
            if group.old is not None:
                log_probs["old_log_probs"] = group.old[place]
            found.append(
                Rollout(
                    group.prompt, answer.ids, float(group.advantages[place]),
                    np.zeros(len(answer.ids), bool) if is_masked else None, log_probs,
                )
            )  # fmt: skip
        return found

    def numbered(self, group: Group, start: int) -> list[Rollout]:
        """The rows of an own group, with numbers in place of the sampler's log-probabilities, by
        which the tokens of a slice of a batch are known."""
        found = []
        for row in self.rows(replace(group, advantages=np.zeros(self.size), old=None)):
            count = len(row.completion_ids)
            numbers_C = np.arange(start, start + count, dtype=np.float32)
            found.append(replace(row, log_probs={SAMPLER: numbers_C}))
            start += count
        return found

    def metrics(self, groups: Sequence[Group], kept: Sequence[Group]) -> dict[str, float]:
        """Numbers of a generation, of all ranks, under TRL's names.

        Args:
            groups: all that were sampled.
            kept: those that are learned.
        """
        counted = kept or groups
        rewards_SF = np.concatenate([each.rewards for each in counted])
        prompts_S = np.repeat([each.prompt_length for each in counted], self.size)
        found = completion_metrics(
            np.concatenate([each.lengths for each in counted]),
            np.concatenate([each.truncated for each in counted]),
            prompts_S,
        )
        found |= reward_metrics(rewards_SF, self.rewards.names, self.settings)
        best = [np.nan_to_num(total_rewards(each.rewards, self.settings)).max() for each in counted]
        return {
            **{name: value for name, value in found.items() if not np.isnan(value)},
            f"pass@{self.size}": float(np.mean([value > 0 for value in best])),
            "prompts/without_signal": 1.0 - float(np.mean([*map(self.has_signal, groups)])),
        }

    def check(self, line: Mapping[str, Any]) -> None:
        """See `check_sampler`; of a line without an update nothing."""
        if line.get(GAP_MEAN) is not None:
            check_sampler(line, self.settings)

    def shown(self, group: Group) -> dict[str, Any]:
        """An own group as a line of a file of predictions."""
        assert group.answers is not None, "of an own group"
        row = self.prompts.conversation(group.number)
        total_G = total_rewards(group.rewards, self.settings)
        texts = [self.processor.decode(each.ids.tolist()) for each in group.answers]
        lines = [f"{total:.3g}  {text}" for total, text in zip(total_G, texts, strict=True)]
        means = zip(self.rewards.names, group.rewards.T, strict=True)
        return {
            "sample": self.prompts.place(group.number),
            "task": str(row.columns.get("task", "")),
            "prompt": row.prompt.text(-1),
            "expected": row.references[0] if row.references else "",
            "answer": "\n".join(lines),
            "is_exact": bool(np.all(total_G == total_G.max())) and bool(total_G.max() > 0),
            "images": [str(each) for each in row.prompt.images if isinstance(each, str | Path)],
            "scores": {
                name: float(np.mean(values_G)) for name, values_G in means
                if not np.isnan(values_G).any()
            },
        }  # fmt: skip
