"""Encoded documents and the pieces of them that go into packed rows.

Where a row ends inside a document's text, the next piece repeats the last token before the cut as
context, so that every text token is predicted once; a piece's first token is no target. A cut is
never inside an image, and never between an image and the first text token behind it, which is
predicted from the image.

    T T T <vis> o o o <end> T T T          T text, o image tokens
     ^ ^ ^                     ^ ^         places of allowed cuts

Shapes: L tokens of a document.
"""

from abc import ABC, abstractmethod

import numpy as np

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.packing import RowBudget

Sample = dict[str, np.ndarray]


class EncodedDocument(ABC):
    """Tokens of a document, without pixels.

    Attributes:
        input_ids: `[L]` int64.
        labels: `[L]` int64, not shifted, -100 where nothing is learned.
        visual: `[L]` bool, placeholders of images and videos, which count for the row's limit.
        marks: `[L]` bool, placeholders and their markers; all others are text.
        is_whole: whether it is cut only if it fits no row.
        note: what to say once about the file that it is from.
    """

    note: str | None = None

    def __init__(
        self,
        input_ids: np.ndarray,
        labels: np.ndarray,
        visual: np.ndarray,
        marks: np.ndarray,
        starts: np.ndarray,
        is_whole: bool,
    ):
        """
        Args:
            starts: `[L]` bool, the first token of each image or video with its markers.
        """
        self.input_ids, self.labels, self.visual, self.marks = input_ids, labels, visual, marks
        self.is_whole = is_whole
        text = ~marks
        # A cut before token i: between two text tokens, or before an image.
        can_cut = np.zeros(len(input_ids) + 1, dtype=bool)
        can_cut[1:-1] = (text[1:] & text[:-1]) | starts[1:]
        can_cut[-1] = True
        self._cuts = np.flatnonzero(can_cut)
        self._visual_before = np.concatenate([[0], np.cumsum(visual)])

    def __len__(self) -> int:
        return len(self.input_ids)

    def end_of_piece(self, begin: int, tokens: int, vision: int) -> int | None:
        """Where the longest piece from `begin` ends that has at most so many tokens and vision
        tokens; None if not even the shortest useful one fits.

        A useful piece has two tokens or an image.
        """
        by_vision = int(
            np.searchsorted(self._visual_before, self._visual_before[begin] + vision, side="right")
        )
        last = min(begin + tokens, by_vision - 1, len(self))
        at = int(np.searchsorted(self._cuts, last, side="right")) - 1
        end = int(self._cuts[at]) if at >= 0 else 0
        return end if end >= begin + 2 else None

    def vision_tokens(self, begin: int, end: int) -> int:
        """Placeholders of images and videos from token `begin` to `end`."""
        return int(self._visual_before[end] - self._visual_before[begin])

    def next_begin(self, end: int) -> int:
        """Where the piece after a cut begins: with the token before the cut if that is text and
        text follows."""
        return end if self.marks[end] or self.marks[end - 1] else end - 1

    def too_large(self, begin: int, budget: RowBudget) -> BadSampleError:
        """The error of a document whose next image fits no row."""
        stop = begin + 1
        while stop < len(self) and self.marks[stop]:
            stop += 1
        return BadSampleError(
            "too_long",
            f"an image of the document (or a conversation with images) has "
            f"{self.vision_tokens(begin, stop)} vision tokens, which fit no row: a row holds "
            f"{budget.tokens} tokens and {budget.vision_limit} vision tokens, one text token "
            "behind the image included; lower data.max_pixels, or raise data.packing_length or "
            "data.max_vision_tokens_per_row",
        )

    @abstractmethod
    def piece(self, begin: int, end: int) -> Sample:
        """Tokens `begin` to `end` as a sample of the collator, with the pixels of their images.

        Raises:
            BadSampleError: an image cannot be used.
        """
