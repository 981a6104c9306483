"""Tensors between the stages of a pipeline, whose shapes both ends know."""

from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor


class Exchange:
    """The messages of one process; both ends issue those of a pair in the same order.

    Nothing here waits for the other end, but gloo's sends do.

    Args:
        group: the processes of the pipeline, by stage.
        dtype: of all messages.
    """

    def __init__(self, group, dtype: str):
        self.group, self.dtype = group, dtype
        # Tasks with what they send, which must live as long as they do.
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, rows: Tensor, stage: int) -> None:
        self._sent = [sent for sent in self._sent if not sent[0].is_completed()]
        rows = rows.contiguous()
        self._sent.append((dist.isend(rows, self.group.ranks[stage], self.group), rows))

    def receive(self, shape: Sequence[int], stage: int) -> "Arriving":
        buffer = paddle.empty(list(shape), dtype=self.dtype)
        return Arriving(buffer, dist.irecv(buffer, self.group.ranks[stage], self.group))

    def finish(self) -> None:
        """Until everything that was sent has left."""
        for task, _ in self._sent:
            task.wait()
        self._sent.clear()


class Arriving:
    """A message on its way."""

    def __init__(self, buffer: Tensor, task):
        self._buffer, self._task = buffer, task

    def wait(self) -> Tensor:
        self._task.wait()
        return self._buffer
