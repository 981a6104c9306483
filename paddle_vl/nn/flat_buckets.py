"""Flat buckets: many float32 tensors of the optimizer in one storage, updated in a few launches.

The tensors become views of the bucket's storage; their moments are views of flat moments. All
tensors of a bucket have the same learning rate, weight decay and place in the parallel layout.

A tensor without a gradient is not updated and its moments do not decay, as without buckets. So a
bucket is divided into segments of neighbouring tensors that have had a gradient in the same steps
so far, and have the same powers of beta; each is updated at once. Which tensors have gradients is
known on the host.

Shapes: N elements of a bucket, with the gaps between its tensors.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import paddle
from paddle import Tensor
from paddle.base.framework import EagerParamBase

from paddle_vl.nn.operations import gradient_of

# Paddle's names of a parameter's optimizer state: the moments, and the powers of beta so far.
STATES = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
POWERS = STATES[2:]
# The moving average of a tensor's values.
AVERAGE = "ema"
# Elements of a bucket, unless one tensor has more. Masking an update copies both moments of a
# segment: 1 GiB at most.
BUCKET_ELEMENTS = 1 << 27
# Pieces that are joined at once: Paddle's kernel copies a longer list of them to the device.
MAX_PIECES = 64
# Tensors begin at multiples of this many elements, 256 bytes or more, as products like it.
ALIGNMENT = 128


class Updates(Protocol):
    """An optimizer whose state a bucket may hold."""

    def update(self, values: Tensor, grad: Tensor) -> None:
        """Update a tensor that is none of the optimizer's parameters, as part of a flat bucket.

        Args:
            values: float32, with `name` and `optimize_attr` as of a parameter, and `states`, its
                state tensors by name.
        """


@dataclass
class Segment:
    """Neighbouring tensors of a bucket with the same history of updates.

    Attributes:
        first, last: its tensors are `first` to `last - 1` of the bucket.
        values: their part of the bucket's values; its `states`, by name, are parts of the moments,
            and powers of beta of its own.
    """

    first: int
    last: int
    values: Any


class FlatBucket:
    """Tensors in one float32 storage, with moments and gradients laid out alike.

    Args:
        tensors: float32 leaves that the optimizer updates; views of `values` afterwards.
        halves: half-precision parameters whose masters these are, to be views of one storage too.
        settings: of all tensors: `optimize_attr` of the optimizer's parameters.
        initial_powers: values of `POWERS` before the first update.
        averages: whether there is a moving average of the values, which begins as the values.

    Attributes:
        average: `[N]`; None without.
        values: `[N]`; its `main_grad` is the flat gradient while there is one.
        segments: in order, without gaps.
    """

    @paddle.no_grad()
    def __init__(
        self,
        tensors: Sequence[Tensor],
        halves: Sequence[Tensor],
        settings: dict[str, Any],
        initial_powers: dict[str, float],
        averages: bool = False,
    ):
        self.tensors, self.halves = list(tensors), list(halves)
        self.sizes = [tensor.size for tensor in tensors]
        self.begins = [0]
        for size in self.sizes:
            self.begins.append(self.begins[-1] + _padded(size))
        self.values: Any = EagerParamBase.from_tensor(
            self._moved(self.tensors, "float32"), trainable=True
        )
        self.values.bucket, self.values.optimize_attr = self, settings
        self.values.main_grad = None
        self.half = self._moved(self.halves, self.halves[0].dtype) if self.halves else None
        self._moments = {state: paddle.zeros_like(self.values) for state in STATES[:2]}
        self.average = self.values.detach().clone() if averages else None
        if self.average is not None:
            self._moments[AVERAGE] = self.average
        self._views = {
            state: [self._view(flat, number) for number in range(len(tensors))]
            for state, flat in self._moments.items()
        }
        # Fills the gaps of joined gradients.
        self._gap = {"float32": paddle.zeros([ALIGNMENT])}
        self._has_gradient = [False] * len(tensors)
        self.segments = [self._segment(0, len(tensors), self._powers(initial_powers))]

    def state(self, number: int, name: str) -> Tensor:
        """The live state of a tensor; powers of beta are shared by a segment."""
        if name in self._views:
            return self._views[name][number]
        return next(s.values.states[name] for s in self.segments if s.first <= number < s.last)

    def set_powers(self, powers: Sequence[dict[str, float]]) -> None:
        """Set the powers of beta of every tensor; neighbours with equal ones make a segment."""
        begins = [n for n in range(len(powers)) if n == 0 or powers[n] != powers[n - 1]]
        ends = [*begins[1:], len(powers)]
        self.segments = [
            self._segment(first, last, self._powers(powers[first]))
            for first, last in zip(begins, ends, strict=True)
        ]

    @paddle.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> None:
        """Add the gradients of as many tensors as the bucket's, and drop these."""
        grads = [gradient_of(tensor) for tensor in tensors]
        if all(grad is None for grad in grads):
            return
        flat_N, total_N = self._joined(grads).astype("float32"), gradient_of(self.values)
        self.values.main_grad = flat_N if total_N is None else total_N.add_(flat_N)
        for number, tensor in enumerate(tensors):
            if grads[number] is not None:
                self._has_gradient[number] = True
                tensor.clear_gradient(False)

    def fill(self) -> None:
        """Give the tensors without a gradient one of zeros."""
        if gradient_of(self.values) is None:
            self.values.main_grad = paddle.zeros_like(self.values)
        self._has_gradient = [True] * len(self.tensors)

    def clear(self) -> None:
        """Drop the gradient."""
        self.values.main_grad = None
        self._has_gradient = [False] * len(self.tensors)

    def update(self, adamw: Updates) -> None:
        """Update the tensors with a gradient."""
        grad_N = gradient_of(self.values)
        if grad_N is None:
            return
        self.segments = [part for segment in self.segments for part in self._divided(segment)]
        for segment in self.segments:
            if self._has_gradient[segment.first]:
                adamw.update(segment.values, self._slice(grad_N, segment))

    @paddle.no_grad()
    def round(self) -> None:
        """Round the values into the half-precision parameters."""
        if self.half is not None:
            paddle.assign(self.values.astype(self.half.dtype), self.half)

    def _divided(self, segment: Segment) -> Iterator[Segment]:
        """The segment, in parts whose tensors all have a gradient or all have none."""
        has, first = self._has_gradient, segment.first
        for number in range(segment.first + 1, segment.last + 1):
            if number == segment.last or has[number] != has[first]:
                whole = first == segment.first and number == segment.last
                powers = {name: segment.values.states[name].clone() for name in POWERS}
                yield segment if whole else self._segment(first, number, powers)
                first = number

    def _segment(self, first: int, last: int, powers: dict[str, Tensor]) -> Segment:
        begin, end = self.begins[first], self.begins[last]
        # Any: these attributes are the optimizer's.
        values: Any = self.values.detach()._slice(begin, end)
        # By which the optimizer knows whether weights decay.
        values.name, values.optimize_attr = self.values.name, self.values.optimize_attr
        values.states = powers | {
            name: flat._slice(begin, end) for name, flat in self._moments.items()
        }
        return Segment(first, last, values)

    def _slice(self, flat_N: Tensor, segment: Segment) -> Tensor:
        return flat_N._slice(self.begins[segment.first], self.begins[segment.last])

    def _view(self, flat_N: Tensor, number: int) -> Tensor:
        view = paddle.empty(self.tensors[number].shape, dtype=flat_N.dtype)
        begin = self.begins[number]
        flat_N._slice(begin, begin + self.sizes[number])._share_buffer_to(view)
        return view

    def _moved(self, tensors: Sequence[Tensor], dtype: Any) -> Tensor:
        """`[N]` with the values of the tensors, which become views of it one by one."""
        flat_N = paddle.zeros([self.begins[-1]], dtype=dtype)
        for tensor, begin in zip(tensors, self.begins, strict=False):
            part = flat_N._slice(begin, begin + tensor.size)
            paddle.assign(tensor.detach().reshape([-1]), part)
            part._share_buffer_to(tensor)
        return flat_N

    def _joined(self, grads: Sequence[Tensor | None]) -> Tensor:
        dtype = next(grad.dtype for grad in grads if grad is not None)
        gap = self._gap.setdefault(str(dtype), paddle.zeros([ALIGNMENT], dtype=dtype))
        pieces = []
        for grad, size in zip(grads, self.sizes, strict=True):
            pieces.append(paddle.zeros([size], dtype) if grad is None else grad.reshape([-1]))
            if missing := _padded(size) - size:
                pieces.append(gap._slice(0, missing))
        return pieces[0] if len(pieces) == 1 else paddle.concat(pieces)

    def _powers(self, values: dict[str, float]) -> dict[str, Tensor]:
        return {name: paddle.full([1], values[name]) for name in POWERS}


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


Key = TypeVar("Key", bound=Hashable)


def grouped(entries: Iterable[tuple[Tensor, Key]]) -> Iterator[tuple[Key, list[int]]]:
    """Numbers of the entries of each bucket, in order.

    Args:
        entries: a tensor, and what all tensors of its bucket have in common.
    """
    open_ones: dict[Key, tuple[list[int], int, int]] = {}
    for number, (tensor, key) in enumerate(entries):
        size = _padded(tensor.size)
        pieces = 1 + (size > tensor.size)
        taken, filled, num_pieces = open_ones.get(key, ([], 0, 0))
        if taken and (filled + size > BUCKET_ELEMENTS or num_pieces + pieces > MAX_PIECES):
            yield key, taken
            taken, filled, num_pieces = [], 0, 0
        open_ones[key] = [*taken, number], filled + size, num_pieces + pieces
    for key, (taken, _, _) in open_ones.items():
        yield key, taken
