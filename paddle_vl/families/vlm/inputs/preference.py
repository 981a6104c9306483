"""Answers that are compared, from conversations to batches.

A pair is a chosen and a rejected answer, mostly to one prompt, whose images are encoded once. A
sample of a pair has arrays under `chosen.` and `rejected.`; one of a rated answer is a sample of
`SampleEncoder` with `is_chosen`.

Shapes: S answers, in pairs chosen before rejected; B, L as in `paddle_vl.batch.schema`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.batch.schema import Array, Axes, VLBatch
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.preference import to_preference
from paddle_vl.data.formats.reader import RowReader
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.inputs.collate import (
    VISUAL_KEYS,
    SampleEncoder,
    TokenSpan,
    VLCollator,
    joined_samples,
    joined_visual,
    sources_of_tokens,
)

SIDES = ("chosen", "rejected")
MISMATCHED = "mismatched_answers"
REFERENCE = "reference_log_probs"
_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
Sample = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False, kw_only=True)
class PreferenceBatch(VLBatch):
    """Answers that are compared, the samples of a batch that gives log-probabilities."""

    # Number of the answer that each target token belongs to, and target tokens of each answer.
    target_branches: Annotated[Array, Axes("N", "int64")] = None
    answer_lengths: Annotated[Array, Axes("S", "float32")] = None
    # 1 or 0: whether the answer is wanted, is of the data, and is not alone in its batch.
    is_chosen: Annotated[Array, Axes("S", "float32")] = None
    is_real: Annotated[Array, Axes("S", "float32")] = None
    has_other: Annotated[Array, Axes("S", "float32")] = None
    # Log-probabilities of the reference, from the data or from the passes before a step; and these
    # passes' `[]`, KTO's z0.
    reference_log_probs: Annotated[Array, Axes("S", "float32")] = None
    kto_baseline: Array = None
    # Each prompt with the answer of another one, for KTO; without pixels, which are the batch's.
    mismatched_answers: VLBatch | None = None


@dataclass(frozen=True)
class ComparedConversation(Conversation):
    """The chosen of two conversations, or a rated one, whose last answer alone is learned.

    Attributes:
        rejected: the other one; None of a rated conversation.
        is_chosen: whether the answer is wanted.
    """

    rejected: Conversation | None = None
    is_chosen: bool = True

    @property
    def branches(self) -> list[Conversation]:
        own = self.with_messages(self.messages)
        return [own] if self.rejected is None else [own, self.rejected]

    @property
    def shares_media(self) -> bool:
        """Whether both conversations have the same images and videos."""
        other = self.rejected
        return other is not None and all(
            len(own) == len(theirs) and all(map(_is_same, own, theirs))
            for own, theirs in ((self.images, other.images), (self.videos, other.videos))
        )


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    # Sources in memory are the same only as objects.
    return type(one) is type(other) and not hasattr(one, "shape") and bool(one == other)


@dataclass(frozen=True)
class PreferenceReader(RowReader):
    """Reads the rows of one source of pairs or rated answers, in any of their forms."""

    def __call__(
        self, row: Mapping[str, Any], directory: Path | None = None
    ) -> ComparedConversation:
        """See `RowReader`."""
        folder, settings = self.opening(directory)
        found = to_preference(row, settings)
        chosen = vars(self.opened(found.chosen, folder))
        rejected = None if found.rejected is None else self.opened(found.rejected, folder)
        return ComparedConversation(**chosen, rejected=rejected, is_chosen=found.is_chosen)


def encoded_answers(
    encoder: SampleEncoder,
    conversation: ComparedConversation,
    max_length: int | None,
    with_pixels: bool = True,
) -> dict[str, np.ndarray]:
    """The sample of a pair or of a rated answer, whose answers are cut at `max_length` tokens.

    Raises:
        BadSampleError: the prompt leaves no room for an answer, or nothing tells the answers of a
            pair apart.
    """
    chosen, *others = conversation.branches
    media = encoder.media(chosen, with_pixels)
    first = _cut(encoder.encode_sample(chosen, media), max_length)
    if not others:
        return {**first, "is_chosen": np.asarray(conversation.is_chosen)}
    sample = {f"chosen.{key}": value for key, value in first.items()}
    is_shared = conversation.shares_media
    media = media if is_shared else encoder.media(others[0], with_pixels)
    second = _cut(encoder.encode_sample(others[0], media), max_length)
    if is_shared and np.array_equal(first["input_ids"], second["input_ids"]):
        is_cut = max_length is not None and len(first["input_ids"]) == max_length
        within = f" up to data.max_length {max_length}, where they are cut" if is_cut else ""
        raise BadSampleError(
            "equal_answers",
            f"the chosen and the rejected answer have the same tokens{within}, from which nothing "
            f"can be learned: {'raise data.max_length, or ' if is_cut else ''}leave the row out",
        )
    kept = {key: value for key, value in second.items() if not is_shared or key not in VISUAL_KEYS}
    sample |= {f"rejected.{key}": value for key, value in kept.items()}
    return {**sample, "shares_media": np.asarray(is_shared)}


def _cut(sample: dict[str, np.ndarray], max_length: int | None) -> dict[str, np.ndarray]:
    labels_L = sample["labels"]
    if max_length is None or len(labels_L) <= max_length:
        return sample
    prompt = _prompt_length(labels_L)
    if prompt >= max_length:
        raise BadSampleError(
            "too_long",
            f"the prompt has {prompt} tokens and data.max_length is {max_length}, which leaves no "
            "room for the answer (prompts are not cut): raise data.max_length, lower "
            "data.max_pixels, or shorten the prompt",
        )
    return {**sample, **{key: sample[key][:max_length] for key in ("input_ids", "labels")}}


def _prompt_length(labels_L: np.ndarray) -> int:
    return int(np.argmax(labels_L != IGNORE_INDEX))


class Answer(NamedTuple):
    """An answer behind its prompt.

    Attributes:
        sample: input_ids, labels, and grids of its images and videos.
        owner: number of the answer that has the pixels, by which equal images are known.
    """

    sample: dict[str, np.ndarray]
    is_chosen: bool
    owner: int


@dataclass(frozen=True)
class PreferenceCollator:
    """Collates samples of `encoded_answers`, both answers of a pair in one batch.

    Attributes:
        collator: of the answers as samples.
        is_packed: whether a row holds the answers of several samples.
        is_paired: whether samples are pairs, and not rated answers.
        has_mismatched: add each prompt with the answer of the sample before it, for KTO. An
            answer alone in its batch has itself there, which does not count: see `has_other`.
        ld_alpha: factor of tokens beyond the length of the pair's shorter answer.
    """

    collator: VLCollator
    is_packed: bool = False
    is_paired: bool = True
    has_mismatched: bool = False
    ld_alpha: float | None = None

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Collate samples, or packed rows of them.

        Returns:
            A batch of `VLCollator` with the fields of `PreferenceBatch`; `visual_gather_indices`
            name the rows of an image again for each answer to it.
        """
        samples_of_rows: Sequence[Sequence[Sample]] = (
            rows if self.is_packed else [[sample] for sample in rows]
        )
        answers: list[Answer] = []
        pixels: dict[int, Sample] = {}
        numbers: list[list[int]] = []
        for samples in samples_of_rows:
            own: list[int] = []
            for sample in samples:
                for answer, visual in _answers_of(sample, len(answers)):
                    own.append(len(answers))
                    answers.append(answer)
                    pixels |= {answer.owner: visual} if visual else {}
            numbers += [own] if self.is_packed else [[number] for number in own]
        batch = self.collated(answers, numbers)
        batch |= self.shared_visual(batch, answers, pixels)
        batch["returns_log_probs"] = True
        batch |= _answer_fields(_of_targets(batch), answers, self.is_paired)
        if self.ld_alpha is not None:
            batch["loss_weights"] = self._length_weights(batch)
        given = [sample[REFERENCE] for samples in samples_of_rows for sample in samples
                 if REFERENCE in sample]  # fmt: skip
        if given:
            batch[REFERENCE] = np.concatenate(given).astype(np.float32)
        if self.has_mismatched:
            batch[MISMATCHED] = self._mismatched(answers, numbers)
        return batch

    def collated(
        self, answers: Sequence[Answer], numbers: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """The answers of each row as a batch, without pixels, with `label_branches`."""
        rows = [[answers[number].sample for number in row] for row in numbers]
        lengths = [[len(sample["input_ids"]) for sample in row] for row in rows]
        joined = [joined_samples(row) for row in rows]
        batch: dict[str, Any] = {**self.collator(joined, lengths if self.is_packed else None)}
        spans = [
            [TokenSpan(length, number) for length, number in zip(*each, strict=True)]
            for each in zip(lengths, numbers, strict=True)
        ]
        batch["label_branches"] = sources_of_tokens(batch["attention_mask"], spans)
        return batch

    def shared_visual(
        self, batch: Mapping[str, Any], answers: Sequence[Answer], pixels: Mapping[int, Sample]
    ) -> dict[str, Any]:
        """Pixels and grids of all images once, and where the tokens of each find their rows."""
        shared: dict[str, Any] = joined_visual(list(pixels.values()))
        # The row of the tower for each visual token, images before videos.
        rows: list[np.ndarray] = []
        start = 0
        for grid in _GRIDS.values():
            starts: dict[int, int] = {}
            for owner, visual in pixels.items():
                starts[owner] = start
                start += self._num_rows(visual, grid)
            for answer in answers:
                if number := self._num_rows(answer.sample, grid):
                    rows.append(starts[answer.owner] + np.arange(number))
        if not rows:
            return shared
        row_of_M = np.concatenate(rows)
        has_both = "visual_source_indices" in batch
        name = "visual_source_indices" if has_both else "visual_gather_indices"
        shared[name] = row_of_M[batch[name]]
        if len(row_of_M) > start:
            shared["num_reused_visual_rows"] = len(row_of_M) - start
        return shared

    def _num_rows(self, sample: Sample, grid: str) -> int:
        if grid not in sample:
            return 0
        return int(sample[grid].prod(axis=1).sum()) // self.collator.spatial_merge_size**2

    def _length_weights(self, batch: Mapping[str, Any]) -> np.ndarray:
        """`[B, L]` float32, `ld_alpha` at tokens beyond the length of the shorter answer."""
        weights_BL = np.ones(batch["labels"].shape, dtype=np.float32)
        lengths_S = batch["answer_lengths"].astype(np.int64)
        is_target_BL = batch["labels"] != IGNORE_INDEX
        for number in range(len(lengths_S)):
            shorter = lengths_S[number // 2 * 2 : number // 2 * 2 + 2].min()
            places = np.nonzero(is_target_BL & (batch["label_branches"] == number))
            weights_BL[tuple(each[shorter:] for each in places)] = self.ld_alpha
        return weights_BL

    def _mismatched(
        self, answers: Sequence[Answer], numbers: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """Each prompt with the answer before it in the batch, without pixels and grids, which are
        the batch's own."""
        exchanged = []
        for number, answer in enumerate(answers):
            before, own = answers[number - 1].sample, answer.sample
            prompt = slice(0, _prompt_length(own["labels"]))
            rest = slice(_prompt_length(before["labels"]), None)
            texts = {
                key: np.concatenate([own[key][prompt], before[key][rest]])
                for key in ("input_ids", "labels")
            }
            exchanged.append(answer._replace(sample={**own, **texts}))
        batch = self.collated(exchanged, numbers)
        batch["returns_log_probs"] = True
        batch |= _answer_fields(_of_targets(batch), exchanged, self.is_paired)
        return {name: value for name, value in batch.items() if name not in VISUAL_KEYS}


def _answers_of(sample: Sample, first: int) -> Iterator[tuple[Answer, Sample]]:
    """The answers of a sample, numbered from `first`, each with the pixels and grids it brings."""
    if "is_chosen" in sample:
        visual = {key: sample[key] for key in VISUAL_KEYS if key in sample}
        yield Answer(_text(sample), bool(sample["is_chosen"]), first), visual
        return
    shares = bool(sample["shares_media"])
    for place, own in enumerate(sides_of(sample).values()):
        is_again = place == 1 and shares
        visual = {} if is_again else {key: own[key] for key in VISUAL_KEYS if key in own}
        yield Answer(_text(own), place == 0, first + (place and not is_again)), visual


def sides_of(sample: Sample) -> dict[str, Sample]:
    """The sample of each answer of a pair, by side; a single one under "" if it is no pair."""
    if "shares_media" not in sample:
        return {"": sample}
    found: dict[str, Sample] = {}
    for side in SIDES:
        start = f"{side}."
        own = {k.removeprefix(start): v for k, v in sample.items() if k.startswith(start)}
        if found and sample["shares_media"]:
            own |= {key: value for key, value in found[SIDES[0]].items() if key in VISUAL_KEYS}
        found[side] = own
    return found


def _text(sample: Sample) -> dict[str, np.ndarray]:
    """The sample without pixels."""
    names = ("input_ids", "labels", *_GRIDS.values())
    return {key: sample[key] for key in names if key in sample}


def _of_targets(batch: Mapping[str, Any]) -> np.ndarray:
    """Number of the answer that each target token belongs to."""
    return batch["label_branches"][:, 1:][batch["labels"][:, 1:] != IGNORE_INDEX]


def _answer_fields(
    numbers_N: np.ndarray, answers: Sequence[Answer], is_paired: bool
) -> dict[str, Any]:
    """The values of each answer; of a batch without any those of one pair that does not count.

    Args:
        numbers_N: see `_of_targets`.
    """
    lengths_S = np.bincount(numbers_N, minlength=len(answers))
    is_chosen_S = np.array([answer.is_chosen for answer in answers], dtype=np.float32)
    if not answers:
        lengths_S, is_chosen_S = np.zeros(2, dtype=np.int64), np.array([1, 0], dtype=np.float32)
    is_real_S = np.full(len(is_chosen_S), bool(answers), dtype=np.float32)
    tokens = [int(lengths_S[is_chosen_S == value].sum()) for value in (1, 0)]
    counts = [int((is_chosen_S == value).sum()) if answers else 0 for value in (1, 0)]
    return {
        "answer_lengths": np.maximum(lengths_S, 1).astype(np.float32),
        "is_chosen": is_chosen_S,
        "is_real": is_real_S,
        "has_other": is_real_S * (len(answers) > 1),
        "num_compared": counts[0] if is_paired else len(answers),
        "num_samples": counts[0] if is_paired else len(answers),
        "num_with_other": len(answers) * (len(answers) > 1),
        "num_chosen": counts[0],
        "num_rejected": counts[1],
        "num_chosen_tokens": tokens[0],
        "num_rejected_tokens": tokens[1],
        "num_batches": int(bool(answers)),
    }


def empty_answers(idle: VLBatch, has_mismatched: bool) -> PreferenceBatch:
    """A batch without targets as one of a pair that does not count."""
    branches_N = np.zeros_like(idle.target_rows[0])
    of_answers = _answer_fields(branches_N[:0], [], is_paired=True)
    names = {each.name for each in fields(PreferenceBatch)}
    batch = PreferenceBatch(
        **vars(idle)
        | {name: value for name, value in of_answers.items() if name in names}
        | {"target_branches": branches_N, "returns_log_probs": True}
    )
    return batch | {MISMATCHED: batch} if has_mismatched else batch
