"""What the prefix of a policy consists of, in order: the one description of its layout.

Training and sampling, embedding and masks all read `PREFIX_BLOCKS`, the planner's `PLANNER_BLOCKS`.

Two questions are kept apart. Which optional parts a batch has a field for is a property of the data
and the same on all ranks: all of these are embedded, always. Which of them any sample fills
differs from batch to batch and from rank to rank: only these are laid out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple


class Source(Enum):
    """Where the tokens of a block come from; `Block.text` says more."""

    VIDEOS = auto()  # every camera's video, one after the other
    IMAGES = auto()  # every camera's image, one after the other
    SUBGOALS = auto()  # every camera's goal image, one after the other
    STATE = auto()  # a token for every step of the history
    FIELD = auto()  # token ids of the batch: TEXT_tokens, TEXT_masks
    LABEL = auto()  # TEXT itself, through the tokenizer
    ACTIONS = auto()  # discrete action tokens


class Attends(Enum):
    """How a block's tokens see each other; all of them see every block before."""

    JOINED = auto()  # all, and those of the block before see them
    TOGETHER = auto()  # all; each camera of a block by itself
    CAUSAL = auto()  # each sees those before it


class When(Enum):
    """When a block is there, for all samples of a batch alike."""

    ALWAYS = auto()
    RESPONSE = auto()
    METADATA = auto()
    SUBGOAL = auto()
    ANY_FIELD = auto()  # any of the three
    NO_FIELD = auto()
    TRAINING = auto()


@dataclass(frozen=True)
class Block:
    """Consecutive tokens of one source.

    Attributes:
        hidden_without_subgoal: padding in samples that have no subgoal. Other labels are real for
            all samples, whether these have what follows or not.
    """

    name: str
    source: Source
    text: str
    attends: Attends
    when: When
    hidden_without_subgoal: bool = False

    @property
    def is_optional(self) -> bool:
        """Whether it depends on the data."""
        return self.when not in (When.ALWAYS, When.TRAINING)


_CAUSAL = Attends.CAUSAL
PREFIX_BLOCKS: tuple[Block, ...] = (
    Block("videos", Source.VIDEOS, "", Attends.JOINED, When.ALWAYS),
    Block("language", Source.FIELD, "lang", _CAUSAL, When.ALWAYS),
    Block("state_label", Source.LABEL, "State: ", _CAUSAL, When.ALWAYS),
    Block("state", Source.STATE, "", Attends.TOGETHER, When.ALWAYS),
    Block("state_end", Source.LABEL, ", ", _CAUSAL, When.ANY_FIELD),
    Block("state_end_alone", Source.LABEL, ":\n", _CAUSAL, When.NO_FIELD),
    Block("response", Source.FIELD, "response", _CAUSAL, When.RESPONSE),
    Block("metadata", Source.FIELD, "metadata", _CAUSAL, When.METADATA),
    Block("fields_end", Source.LABEL, ";\n ", _CAUSAL, When.ANY_FIELD),
    Block("subgoal_label", Source.LABEL, "Subgoal: ", _CAUSAL, When.SUBGOAL, True),
    Block("subgoals", Source.SUBGOALS, "", Attends.TOGETHER, When.SUBGOAL),
    Block("subgoal_end", Source.LABEL, ", ", _CAUSAL, When.SUBGOAL, True),
    # The action tail: the expert never sees what follows.
    Block("action_label", Source.LABEL, "Action: ", _CAUSAL, When.TRAINING),
    Block("actions", Source.ACTIONS, "", _CAUSAL, When.TRAINING),
)
# The planner reads the state as a part of the language, and writes what is there in training only.
PLANNER_BLOCKS: tuple[Block, ...] = (
    Block("images", Source.IMAGES, "", Attends.JOINED, When.ALWAYS),
    Block("language", Source.FIELD, "lang", _CAUSAL, When.ALWAYS),
    Block("metadata", Source.FIELD, "metadata", _CAUSAL, When.METADATA),
    Block("fields_end", Source.LABEL, ";\n ", _CAUSAL, When.METADATA),
    Block("memory_label", Source.LABEL, "Updated Memory: ", _CAUSAL, When.ALWAYS),
    Block("memory", Source.FIELD, "memory", _CAUSAL, When.TRAINING),
    Block("response_label", Source.LABEL, "Subtask: ", _CAUSAL, When.TRAINING),
    Block("response", Source.FIELD, "response", _CAUSAL, When.TRAINING),
)


def labels_of(blocks: tuple[Block, ...]) -> tuple[str, ...]:
    """The labels among blocks, each once."""
    return tuple(dict.fromkeys(b.text for b in blocks if b.source is Source.LABEL))


LABELS, PLANNER_LABELS = labels_of(PREFIX_BLOCKS), labels_of(PLANNER_BLOCKS)


class Presence(NamedTuple):
    """Which optional parts there are: filled by any sample of a batch, or as fields of it."""

    response: bool
    metadata: bool
    subgoal: bool

    def has(self, block: Block, training: bool) -> bool:
        """Whether the block is a part of the prefix."""
        return {
            When.ALWAYS: True,
            When.RESPONSE: self.response,
            When.METADATA: self.metadata,
            When.SUBGOAL: self.subgoal,
            When.ANY_FIELD: any(self),
            When.NO_FIELD: not any(self),
            When.TRAINING: training,
        }[block.when]


def fields_of(batch: Mapping[str, Any]) -> Presence:
    """Which optional parts a batch has a field for, filled or not."""
    return Presence(
        batch.get("response_tokens") is not None,
        batch.get("metadata_tokens") is not None,
        bool(batch.get("subgoal_images")),
    )


def embedded_blocks(
    blocks: tuple[Block, ...], fields: Presence, presence: Presence, training: bool
) -> list[Block]:
    """Those of the blocks that are embedded, laid out or not: the same on ranks of equal fields.

    Raises:
        ValueError: a part is to be laid out that there is no field for.
    """
    found = [b for b in blocks if fields.has(b, training) or b.when is When.NO_FIELD]
    lacking = [b.name for b in blocks if presence.has(b, training) and b not in found]
    if lacking:
        raise ValueError(
            f"the blocks {lacking} are to be laid out, but the batch has no field for them: give "
            "every rank's batches the same fields, masked where there is nothing"
        )
    return found


def presence_of(batch: Mapping[str, Any]) -> Presence:
    """Which optional parts have a real token or image in any sample.

    Reads the masks on the host: they are to be NumPy arrays, a GPU would have to be waited for.
    """

    def any_real(*masks: Any) -> bool:
        return any(bool(mask.any()) for mask in masks if mask is not None)

    return Presence(
        any_real(batch.get("response_masks")),
        any_real(batch.get("metadata_masks")),
        any_real(*(batch.get("subgoal_img_masks") or ())),
    )
