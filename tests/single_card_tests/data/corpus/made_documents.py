"""Made-up documents, which say in their ids where each token comes from."""

from dataclasses import dataclass

import numpy as np

from paddle_vl.data.corpus.document import EncodedDocument, Sample
from paddle_vl.data.jsonl import BadSampleError

TEXT, START, PAD, END = 0, 1, 2, 3
# An id is document * SPAN + place; kinds are kept beside.
SPAN = 100_000


class MadeDocument(EncodedDocument):
    def __init__(self, number: int, kinds: np.ndarray, is_whole: bool):
        ids = number * SPAN + np.arange(len(kinds))
        marks = kinds != TEXT
        self.kinds = kinds
        super().__init__(
            ids, np.where(marks, -100, ids), kinds == PAD, marks, kinds == START, is_whole
        )

    def piece(self, begin: int, end: int) -> Sample:
        return {
            "input_ids": self.input_ids[begin:end],
            "labels": self.labels[begin:end],
            "kinds": self.kinds[begin:end],
        }


def image(tokens: int) -> list[int]:
    return [START, *[PAD] * tokens, END]


@dataclass(frozen=True)
class MadeSource:
    """Documents of random lengths.

    Attributes:
        kind: text, caption (an image and text, not cut) or page (texts and images).
        bad: every so many documents one is bad; 0 for none.
    """

    kind: str
    seed: int
    mean: int = 60
    bad: int = 0
    largest_image: int = 24

    def encoded(self, number: int) -> MadeDocument:
        if self.bad and number % self.bad == 0:
            raise BadSampleError("made_bad", "it is bad")
        rng = np.random.default_rng([self.seed, number])
        own = self.seed * 1_000_000 + number
        length = 2 + int(rng.exponential(self.mean))
        if self.kind == "text":
            return MadeDocument(own, np.zeros(length, dtype=np.int64), False)
        size = int(rng.integers(4, self.largest_image))
        if self.kind == "caption":
            return MadeDocument(own, np.array(image(size) + [TEXT] * (2 + length // 4)), True)
        kinds: list[int] = []
        for _ in range(int(rng.integers(1, 5))):
            kinds += [TEXT] * int(rng.integers(0, length)) + image(int(rng.integers(4, size + 1)))
        return MadeDocument(own, np.array([*kinds, TEXT]), False)

    def where(self, number: int) -> str:
        return f"{self.kind}:{number}"


def collate(rows) -> dict:
    """A batch of the rows as they are."""
    return {"rows": [[piece.sample["input_ids"].tolist() for piece in row] for row in rows]}
