"""Prompts of a run that learns from rewards: rows, and samples of them for a loader."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.prompts import to_prompt
from paddle_vl.data.formats.reader import RowReader
from paddle_vl.data.jsonl import BadSampleError, sample_at
from paddle_vl.families.vlm.inputs.collate import VISUAL_KEYS
from paddle_vl.families.vlm.inputs.dataset import ConversationData
from paddle_vl.families.vlm.templates.messages import THINK, THINK_END

# Prompts whose length is known before a run begins, of headers alone.
_MEASURED = 256


@dataclass(frozen=True)
class PromptConversation(Conversation):
    """A prompt, and behind it a right answer as a turn, which is never learned.

    Attributes:
        row: the row's other values.
        references: right answers; empty where the row gives none.
    """

    row: Mapping[str, Any] = field(default_factory=dict)
    references: Sequence[str] = ()

    @property
    def columns(self) -> Mapping[str, Any]:
        return self.row

    @property
    def prompt(self) -> Conversation:
        """The conversation up to the answer."""
        return self.with_messages(self.messages[:-1])


@dataclass(frozen=True)
class PromptReader(RowReader):
    """Reads the rows of one source of prompts.

    Attributes:
        is_asked: whether an evaluation asks the rows, which may end in their right answer.
    """

    is_asked: bool = False

    def __call__(self, row: Mapping[str, Any], directory: Path | None = None) -> Conversation:
        """See `RowReader`."""
        folder, settings = self.opening(directory)
        found = to_prompt(row, settings)
        references = found.references
        if found.answer is not None and not references:
            if self.is_asked:
                return super().__call__(row, directory)
            raise BadSampleError(
                "ends_in_answer",
                "the prompt ends in an answer, and the model is to answer: remove it, or write it "
                "as 'solution', with which it is left out",
            )
        if self.is_asked and not references:
            raise BadSampleError(
                "no_answer",
                "the row has no right answer to compare with: give it a 'solution', or leave it "
                "out of data.eval",
            )
        opened = self.opened(found.prompt, folder)
        text = references[0] if references else "?"
        answer: Any = {
            "role": "assistant",
            "content": [{"type": "text", "text": text}],
            "loss": True,
        }
        own = vars(opened.with_messages([*opened.messages, answer]))
        task = {"task": found.columns["task"]} if "task" in found.columns else {}
        extras = {"references": [*references], **task} if self.is_asked else {}
        made = {**own, "extras": extras, "row": found.columns, "references": references}
        return PromptConversation(**made)


@dataclass
class Prompts:
    """A `paddle_vl.data.samples.SampleSource` of prompts, by number.

    A sample has the arrays of the prompt, its `number` and the `epoch`.

    Attributes:
        data: conversations of a `PromptReader`.
        max_completion_length: room that a prompt leaves for an answer.
        epoch: of the samples.

    Raises:
        BadSampleError: where bad prompts are not skipped, one that leaves no room, of the first.
    """

    data: ConversationData
    max_completion_length: int
    epoch: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    source_names = ()

    def __post_init__(self):
        self.on_bad_sample, self.fingerprint = self.data.on_bad_sample, self.data.fingerprint
        self.files, self.place = self.data.files, self.data.place
        self.contents = getattr(self.data, "contents", ())
        self.skipped = self.data.skipped

    def check_room(self) -> None:
        """Measure the first prompts.

        Raises:
            BadSampleError: where bad prompts are not skipped, the first that leaves no room.
        """
        for number in range(min(len(self), _MEASURED) if self.on_bad_sample == "fail" else 0):
            processor, longest = self.data.limits(self.data.row_of(number))
            with sample_at(partial(self.place, number)):
                whole = processor.outline_sample(self.data.conversation(number))
                self._check(int(np.argmax(whole["labels"] >= 0)), longest)

    def check_reasoning(self, patterns: Sequence[str]) -> None:
        """Check that the first prompts leave answers the reasoning that is scored. An answer is
        scored as it was sampled, from where its prompt ends.

        Args:
            patterns: of rewards.

        Raises:
            ValueError: a template has written what a pattern asks for, or the tokenizer hides it.
        """
        asking = [each for each in patterns if THINK in each or THINK_END in each]
        for number in range(min(len(self), _MEASURED)):
            processor, _ = self.data.limits(self.data.row_of(number))
            with sample_at(partial(self.place, number)):
                prompt = self.conversation(number).prompt
                text = processor.template.text(prompt, add_generation_prompt=True).rstrip()
            problem, opens = None, text.endswith(THINK)
            special = {THINK, THINK_END} & {*processor.tokenizer.special_tokens.values()}
            if special and (opens or asking):
                problem = (
                    f"the tokenizer calls {min(special)} a special token, which texts of answers "
                    "are without, so that no reward tells the reasoning from the answer: set "
                    '"special": false for it in tokenizer.json'
                )
            elif asking and text.endswith(THINK_END):
                problem = (
                    f"the prompt ends with {text[-20:]!r}, which closes the reasoning that "
                    f"grpo.rewards format:{asking[0]} asks answers for: let the template open it, "
                    "e.g. data.chat_template_kwargs={enable_thinking: true}, or remove that reward"
                )
            elif opens and (repeated := [each for each in asking if THINK in each]):
                problem = (
                    f"the prompt ends with {THINK}, which no answer repeats, so that none matches "
                    f"grpo.rewards format:{repeated[0]}: write what follows it, e.g. "
                    f"format:.+{THINK_END}.+"
                )
            if problem is not None:
                raise ValueError(f"{self.place(number)}: {problem}")

    def in_epoch(self, epoch: int) -> "Prompts":
        """The prompts with the number of another epoch."""
        return replace(self, epoch=epoch)

    def conversation(self, number: int) -> PromptConversation:
        """The row of a prompt."""
        found = self.data.conversation(number)
        assert isinstance(found, PromptConversation), "the reader makes them"
        return found

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        processor, longest = self.data.limits(self.data.row_of(number))
        prompt = self.conversation(number).prompt
        with sample_at(partial(self.place, number)):
            encoded = processor.encode_prompts([prompt], add_generation_prompt=True)
            ids_L = encoded["input_ids"][0]
            self._check(len(ids_L), longest)
        visual = {key: encoded[key] for key in VISUAL_KEYS if key in encoded}
        numbers = {"number": np.array(number), "epoch": np.array(self.epoch)}
        return {"input_ids": ids_L, **visual, **numbers}

    def _check(self, length: int, longest: int | None) -> None:
        room = self.max_completion_length
        if longest is not None and length + room > longest:
            raise BadSampleError(
                "too_long",
                f"the prompt has {length} tokens, which leaves no room for "
                f"grpo.max_completion_length {room} within data.max_length {longest} (prompts are "
                "not cut): raise data.max_length, lower data.max_pixels, or shorten the prompt",
            )
