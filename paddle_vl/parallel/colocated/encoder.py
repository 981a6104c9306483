"""What the colocated schedule asks of a model family: its encoder, by items and sections.

An item (an image, a video) becomes some rows. A row has sections side by side: the merged row, and
for Qwen3-VL one section per deepstack level. Each section is used by one model chunk.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from paddle import Tensor


class ItemEncoder(Protocol):
    """A family's encoder. M rows, C the sum of `section_widths`.

    Attributes:
        splits_rows: whether mp ranks use different rows of a batch under sequence parallelism, so
            that each has a part of their gradients.
    """

    @property
    def section_widths(self) -> Sequence[int]: ...

    @property
    def splits_rows(self) -> bool: ...

    def parameters(self) -> list[Tensor]:
        """Of the encoder, trained and frozen."""
        ...

    def items(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        """Rows of each item of a batch, in the order of its rows, and the relative cost of encoding
        each, `[I]`; from its host arrays alone. All ranks that load a batch find the same items,
        without agreeing on anything; an empty batch has none."""
        ...

    def has_items_anywhere(self, batch: Any) -> bool:
        """Whether any rank's micro-batch at this position has items; the same on every rank."""
        ...

    def encode(self, batches: Sequence[Any], own: Sequence[np.ndarray]) -> Tensor:
        """`[M, C]`: rows of the given items of each batch, in order; at least one item."""
        ...

    def sections_of(self, chunk: Any) -> Collection[int]:
        """Sections that a model chunk uses."""
        ...

    def language_batch(self, batch: Any, sections: Mapping[int, Tensor]) -> Any:
        """The batch for a model chunk, with its sections of the batch's rows in place of pixels.

        Args:
            sections: `[M, width]` by section number; empty for a batch without items.
        """
        ...
