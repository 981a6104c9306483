"""A sample of training data for a reader: its text with its loss, and what the model sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paddle_vl.data.formats.grounding import Box


class Run(NamedTuple):
    """Text whose tokens all carry the loss, or all carry none."""

    text: str
    is_learned: bool


@dataclass(frozen=True)
class ShownSample:
    """A sample of training data.

    Attributes:
        place: `file:line`.
        runs: its text, with placeholders of a picture counted.
        tokens, learned: number of tokens, and of those with loss.
        pictures: `[H, W, 3]` uint8 each, as resized for the model; of a video some frames.
        boxes: of the answers, in thousandths; drawn if there is one picture.
    """

    place: str
    runs: Sequence[Run]
    tokens: int
    learned: int
    pictures: Sequence[np.ndarray] = ()
    boxes: Sequence[Box] = ()

    @property
    def summary(self) -> str:
        sizes = ", ".join(f"{each.shape[1]} x {each.shape[0]}" for each in self.pictures)
        pictures = f"; pictures of {sizes} pixels" if sizes else ""
        return f"{self.tokens} tokens, {self.learned} of them with loss{pictures}"
