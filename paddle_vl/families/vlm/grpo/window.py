"""Groups of a generation, as ranks tell them each other and as a checkpoint stores them.

Shapes: K groups, G answers to a prompt, F rewards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_vl.families.vlm.answering.groups import Sampled

Sample = Mapping[str, np.ndarray]


@dataclass
class Group:
    """A prompt and its answers.

    Attributes:
        number, epoch: of the prompt.
        owner: data rank that learns it.
        rewards: `[G, F]`, NaN where a reward does not judge.
        lengths, truncated: `[G]`, tokens of the answers, and whether each has no end.
        prompt_length: in tokens.
        advantages: `[G]`, once they are known.
        prompt, answers: arrays of the prompt, and the answers; of the owner's groups alone.
        old: log-probabilities of each answer, once they are known, likewise.
    """

    number: int
    epoch: int
    owner: int
    rewards: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray
    prompt_length: int
    advantages: np.ndarray | None = None
    prompt: Sample | None = None
    answers: Sequence[Sampled] | None = None
    old: Sequence[np.ndarray] | None = None


def described(
    prompts: Sequence[Any], sampled: Sequence[Sequence[Sampled]], rewards_SF: np.ndarray
) -> list[Any]:
    """What all ranks know of the groups of a rank, JSON values."""
    rewards = np.split(rewards_SF, len(prompts))
    return [
        [
            *(int(prompt["number"]), int(prompt["epoch"]), len(prompt["input_ids"])),
            [[None if np.isnan(x) else float(x) for x in row] for row in rewards_GF],
            [len(each.ids) for each in answers],
            [each.is_truncated for each in answers],
        ]
        for prompt, answers, rewards_GF in zip(prompts, sampled, rewards, strict=True)
    ]


def groups_of(rank: int, told: Sequence[Any]) -> list[Group]:
    """The groups that a data rank has `described`."""
    return [
        Group(
            number, epoch, rank, np.array(rewards, np.float32), np.array(lengths), np.array(cut),
            length,
        )
        for number, epoch, length, rewards, lengths, cut in told
    ]  # fmt: skip


def arrays_of(groups: Sequence[Group], answers: dict[int, Any]) -> dict[str, np.ndarray]:
    """The arrays of a file of groups.

    Args:
        answers: `told_answers` of each.
    """
    each = [answers[place] for place in range(len(groups))]

    def joined(number: int, dtype: Any) -> np.ndarray:
        return np.array([x for of in each for row in of[number] for x in row], dtype)

    return {
        "numbers": np.array([[g.number, g.epoch, g.owner, g.prompt_length] for g in groups]),
        "rewards": np.stack([g.rewards for g in groups]),
        "lengths": np.stack([g.lengths for g in groups]).astype(np.int64),
        "truncated": np.stack([g.truncated for g in groups]),
        "advantages": np.stack([np.asarray(g.advantages, np.float32) for g in groups]),
        "ids": joined(0, np.int64),
        "sampler_log_probs": joined(1, np.float32),
        "old_log_probs": joined(2, np.float32),
    }


def restored(arrays: Mapping[str, np.ndarray]) -> list[Group]:
    """The groups of `arrays_of`, without their prompts."""
    lengths_KG = arrays["lengths"]
    ends = np.cumsum(lengths_KG)[:-1]
    ids, sampler = (np.split(arrays[name], ends) for name in ("ids", "sampler_log_probs"))
    old = np.split(arrays["old_log_probs"], ends) if len(arrays["old_log_probs"]) else None
    groups, size = [], lengths_KG.shape[1]
    for place, (number, epoch, owner, prompt_length) in enumerate(arrays["numbers"].tolist()):
        rows = range(place * size, (place + 1) * size)
        cut_G = arrays["truncated"][place]
        groups.append(
            Group(
                number, epoch, owner, arrays["rewards"][place], lengths_KG[place], cut_G,
                prompt_length, arrays["advantages"][place], None,
                [
                    Sampled(ids[i], sampler[i], bool(cut))
                    for i, cut in zip(rows, cut_G, strict=True)
                ],
                None if old is None else [old[i] for i in rows],
            )
        )  # fmt: skip
    return groups


def told_sampled(groups: Sequence[Sequence[Sampled]]) -> list[Any]:
    """The answers to some prompts as JSON values."""
    return [
        [
            [each.ids.tolist(), each.log_probs.astype(float).tolist(), each.is_truncated]
            for each in group
        ]
        for group in groups
    ]


def sampled_of(told: Sequence[Any]) -> list[list[Sampled]]:
    """The answers of `told_sampled`."""
    return [
        [
            Sampled(np.array(ids, np.int64), np.array(log_probs, np.float32), is_cut)
            for ids, log_probs, is_cut in group
        ]
        for group in told
    ]


def told_answers(group: Group) -> list[Any]:
    """Ids and log-probabilities of an own group's answers, JSON values."""
    assert group.answers is not None, "of an own group"
    return [
        [each.ids.tolist() for each in group.answers],
        [each.log_probs.astype(float).tolist() for each in group.answers],
        [each.astype(float).tolist() for each in group.old or ()],
    ]
