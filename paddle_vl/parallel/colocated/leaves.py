"""Detached rows of the encoder as leaves of the language model's graphs, one per micro-batch.

A leaf per micro-batch and section: slices of one leaf inside the graph would cost twice its bytes
in the backward pass. Only the sections that this stage uses are kept.

Shapes: M rows of a micro-batch, R rows of the step in this data lane, C the width of all sections.
"""

from collections.abc import Collection, Sequence

import paddle
from paddle import Tensor


class Leaves:
    """Rows of a step on this rank, and the gradients that the language model leaves on them.

    Args:
        full_RC: the rows of all micro-batches.
        rows_of_batch: number of rows of each micro-batch.
        widths: of the sections.
        used: sections that this stage uses.
        needs_gradient: whether the encoder is trained.
        offloads: keep rows in host memory until a micro-batch begins, and gradients once it ends.
    """

    @paddle.no_grad()
    def __init__(
        self,
        full_RC: Tensor,
        rows_of_batch: Sequence[int],
        widths: Sequence[int],
        used: Collection[int],
        needs_gradient: bool,
        offloads: bool = False,
    ):
        self.rows_of_batch, self.widths = list(rows_of_batch), list(widths)
        self._dtype, self._needs_gradient, self._offloads = full_RC.dtype, needs_gradient, offloads
        # Rows and gradients by micro-batch and section; with offloading on the host.
        self._rows: dict[tuple[int, int], Tensor] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._leaves: dict[tuple[int, int], Tensor] = {}
        ends, start = [sum(widths[: i + 1]) for i in range(len(widths))], 0
        for number, count in enumerate(rows_of_batch):
            for section in sorted(used) if count else ():
                end = ends[section]
                rows = full_RC[start : start + count, end - widths[section] : end].clone()
                self._rows[number, section] = rows.cpu() if offloads else rows
            start += count

    def sections(self, number: int, wanted: Collection[int]) -> dict[int, Tensor]:
        """The leaves of a micro-batch; empty for one without rows."""
        if not self.rows_of_batch[number]:
            return {}
        return {section: self._leaf(number, section) for section in wanted}

    def collect(self) -> None:
        """After a backward pass: with offloading, move finished gradients to the host."""
        if not self._offloads:
            return
        for key, leaf in list(self._leaves.items()):
            if leaf.grad is not None:
                self._gradients[key] = leaf.grad.cpu()
                del self._leaves[key]

    @paddle.no_grad()
    def gradient(self) -> Tensor:
        """`[R, C]`: this rank's gradients, zeros where it has none. Drops the leaves."""
        parts = []
        for number, count in enumerate(self.rows_of_batch):
            if count:
                columns = [self._gradient(number, s, count) for s in range(len(self.widths))]
                parts.append(paddle.concat(columns, axis=1))
        self._leaves.clear()
        self._gradients.clear()
        self._rows.clear()
        if not parts:
            return paddle.zeros([0, sum(self.widths)], dtype=self._dtype)
        return paddle.concat(parts)

    @property
    def num_bytes_on_device(self) -> int:
        """Bytes of rows that lie on the device now."""
        tensors = [*self._leaves.values(), *(() if self._offloads else self._rows.values())]
        return sum(tensor.size * tensor.element_size() for tensor in tensors)

    def _leaf(self, number: int, section: int) -> Tensor:
        key = number, section
        leaf = self._leaves.get(key)
        if leaf is None:
            rows = self._rows[key]
            leaf = rows.to(paddle.get_device()).detach() if self._offloads else rows
            if self._needs_gradient:
                leaf.stop_gradient = False
                self._leaves[key] = leaf
        return leaf

    def _gradient(self, number: int, section: int, count: int) -> Tensor:
        key = number, section
        if key in self._gradients:
            return self._gradients[key].to(paddle.get_device())
        leaf = self._leaves.get(key)
        if leaf is None or leaf.grad is None:
            return paddle.zeros([count, self.widths[section]], dtype=self._dtype)
        return leaf.grad
