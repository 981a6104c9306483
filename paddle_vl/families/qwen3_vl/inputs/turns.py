"""What a conversation is: turns of text, images and videos, and which of them are learned."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.image_file import ImageSource
from paddle_vl.data.video_reader import VideoSource


class ImagePart(NamedTuple):
    """An image within a turn."""

    source: ImageSource


class VideoPart(NamedTuple):
    """A video within a turn."""

    source: VideoSource


Part = str | ImagePart | VideoPart


@dataclass(frozen=True)
class Turn:
    """One message: who speaks, and text, images and videos in reading order.

    Attributes:
        is_target: whether it is learned; of an assistant's turn.
    """

    role: str
    parts: tuple[Part, ...]
    is_target: bool = True

    @property
    def text(self) -> str:
        """The text without images and videos."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True)
class Conversation:
    """A validated conversation.

    Attributes:
        turns: in order; a system turn can only be the first.
        extra: entries of the record that are neither messages nor media, such as `task`.
    """

    turns: tuple[Turn, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> list[ImageSource]:
        """Sources of all images in reading order."""
        return self._sources(ImagePart)

    @property
    def videos(self) -> list[VideoSource]:
        """Sources of all videos in reading order."""
        return self._sources(VideoPart)

    def _sources(self, kind: type) -> list[Any]:
        return [part.source for turn in self.turns for part in turn.parts if isinstance(part, kind)]

    def prompt_and_answer(self) -> tuple["Conversation", str]:
        """Everything before the last assistant turn that is a target, and the text of that turn.

        Raises:
            BadSampleError: there is no such turn.
        """
        self.check_targets()
        last = self.targets[-1]
        return replace(self, turns=self.turns[:last]), self.turns[last].text

    @property
    def targets(self) -> list[int]:
        """Numbers of the turns that are learned: the assistant's, but those told not to be."""
        turns = enumerate(self.turns)
        return [i for i, turn in turns if turn.role == "assistant" and turn.is_target]

    def check_targets(self) -> None:
        """Check that there is something to learn from.

        Raises:
            BadSampleError: no assistant turn, none that is a target, or an empty one that is.
        """
        answers = [i for i, turn in enumerate(self.turns) if turn.role == "assistant"]
        if not answers:
            raise BadSampleError(
                "no_assistant", "the conversation has no assistant turn, so nothing to learn from"
            )
        if not self.targets:
            raise BadSampleError(
                "no_target",
                f"none of the {len(answers)} assistant turn(s) is to be learned (by 'loss', "
                "'weight' or 'label'): leave the sample out, or set one to true",
            )
        for i in self.targets:
            if not self.turns[i].text:
                raise BadSampleError(
                    "empty_answer",
                    f"the answer in turn {i + 1} is empty, so that only the end of an answer would "
                    "be learned: write one, set its 'loss' to false, or leave it out",
                )
