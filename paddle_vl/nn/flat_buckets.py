"""Flat buckets: many float32 tensors of the optimizer in one storage, updated in a few launches.

The tensors become views of the bucket's storage; their moments are views of flat moments. All
tensors of a bucket have the same learning rate, weight decay and place in the parallel layout.

Gradients are added to one float32 buffer in the backward pass, as soon as a tensor has its own,
which is then freed. The buffer exists from the first gradient of a step to `clear`.

A tensor without a gradient is not updated and its moments do not decay, as without buckets. So a
bucket is divided into segments of neighbouring tensors that have had a gradient in the same steps
so far, and have the same powers of beta; each is updated at once. Which tensors have gradients is
known on the host.

Shapes: N elements of a bucket, with the gaps between its tensors.
"""

import itertools
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import paddle
from paddle import Tensor
from paddle.base.framework import EagerParamBase

from paddle_vl.nn.linear import gradient_of

# Paddle's names of a parameter's optimizer state: the moments, and the powers of beta so far.
STATES = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
POWERS = STATES[2:]
# The moving average of a tensor's values.
AVERAGE = "ema"
# Elements of a bucket, unless one tensor has more: 512 MiB of gradients.
BUCKET_ELEMENTS = 1 << 27
# Tensors begin at multiples of this many elements, 256 bytes or more, as products like it.
ALIGNMENT = 128


@dataclass
class Segment:
    """Neighbouring tensors of a bucket with the same history of updates.

    Attributes:
        first, last: its tensors are `first` to `last - 1` of the bucket.
        values: their part of the bucket's values; its `states`, by name, are parts of the moments,
            and powers of beta of its own, in host memory.
        half: their part of the half-precision parameters; None without these.
    """

    first: int
    last: int
    values: Any
    half: Tensor | None


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
        leaves: the tensors that get gradients in a backward pass, if `tensors` are no shards.
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
        self.half = self._moved(self.halves, self.halves[0].dtype) if self.halves else None
        self._moments = {state: paddle.zeros_like(self.values) for state in STATES[:2]}
        self.average = self.values.detach().clone() if averages else None
        if self.average is not None:
            self._moments[AVERAGE] = self.average
        self._views = {
            state: [self._view(flat, number) for number in range(len(tensors))]
            for state, flat in self._moments.items()
        }
        self.segments = [self._segment(0, len(tensors), _powers(initial_powers))]
        self.leaves = self.halves or self.tensors
        # Parts of the flat gradient, by the number of a tensor that has one.
        self._gradients: dict[int, Tensor] = {}
        self.clear()
        for number, leaf in enumerate(self.leaves):
            # A parameter does not keep its bucket alive, so that both are freed at once.
            leaf._register_backward_hook(partial(_take_in, weakref.ref(self), number))

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
            self._segment(first, last, _powers(powers[first]))
            for first, last in zip(begins, ends, strict=True)
        ]

    def take_all(self) -> None:
        """Take in gradients that were set outside of a backward pass, as those of shards."""
        for number in range(len(self.leaves)):
            self.take(number)

    @paddle.no_grad()
    def take(self, number: int) -> None:
        """Add the gradient of a tensor to the flat one, and drop it."""
        leaf, own = self.leaves[number], self._gradients.get(number)
        made = leaf.main_grad
        # A product of fleet's that adds to `main_grad` makes one, or has added to ours.
        if made is not None and own is not None and made.data_ptr() == own.data_ptr():
            made = None
        for grad in (made, leaf.grad):
            if grad is not None:
                # On a GPU one kernel adds half precision to float32.
                self._gradient(number).add_(grad)
        leaf.clear_gradient(False)

    def fill(self) -> None:
        """Give the tensors without a gradient one of zeros."""
        for number in range(len(self.tensors)):
            self._gradient(number)

    def drop(self, number: int) -> None:
        """Drop the gradient of a tensor, which is not updated then."""
        self._gradients.pop(number, None)
        self.leaves[number].main_grad = None

    def clear(self) -> None:
        """Drop the gradient."""
        self._gradients.clear()
        for tensor in (self.values, *self.leaves):
            tensor.main_grad = None

    def update(self, adamw: Any) -> None:
        """Update the tensors with a gradient, and round them into the half-precision ones.

        Args:
            adamw: see `paddle_vl.train.optimizer.AdamW.update`.
        """
        grad_N = self.values.main_grad
        if grad_N is None:
            return
        self.segments = [part for segment in self.segments for part in self._divided(segment)]
        for segment in self.segments:
            if segment.first in self._gradients:
                adamw.update(segment.values, self._part(grad_N, segment), segment.half)

    @paddle.no_grad()
    def round(self) -> None:
        """Round the values into the half-precision parameters."""
        if self.half is not None:
            paddle.assign(self.values.astype(self.half.dtype), self.half)

    def _divided(self, segment: Segment) -> Iterator[Segment]:
        """The segment, in parts whose tensors all have a gradient or all have none."""
        has, first, last = self._gradients, segment.first, segment.last
        begins = [n for n in range(first, last) if n == first or (n in has) != (n - 1 in has)]
        if len(begins) == 1:
            yield segment
            return
        for begin, end in itertools.pairwise([*begins, last]):
            powers = {name: segment.values.states[name].clone() for name in POWERS}
            yield self._segment(begin, end, powers)

    def _segment(self, first: int, last: int, powers: dict[str, Tensor]) -> Segment:
        begin, end = self.begins[first], self.begins[last]
        # Any: these attributes are the optimizer's.
        values: Any = self.values.detach()._slice(begin, end)
        # By which the optimizer knows whether weights decay.
        values.name, values.optimize_attr = self.values.name, self.values.optimize_attr
        values.states = powers | {
            name: flat._slice(begin, end) for name, flat in self._moments.items()
        }
        half = None if self.half is None else self.half._slice(begin, end)
        return Segment(first, last, values, half)

    def _gradient(self, number: int) -> Tensor:
        """A tensor's part of the flat gradient, of zeros at first."""
        if self.values.main_grad is None:
            self.values.main_grad = paddle.zeros_like(self.values)
        if number not in self._gradients:
            self._gradients[number] = self._view(self.values.main_grad, number)
        self.leaves[number].main_grad = self._gradients[number]
        return self._gradients[number]

    def _part(self, flat_N: Tensor, segment: Segment) -> Tensor:
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


def _take_in(bucket: "weakref.ref[FlatBucket]", number: int) -> None:
    """Hook of a tensor that has got its gradient."""
    if (own := bucket()) is not None:
        own.take(number)


def _powers(values: dict[str, float]) -> dict[str, Tensor]:
    """In host memory, where Paddle's kernels read and write them without a launch."""
    return {name: paddle.full([1], values[name], device="cpu") for name in POWERS}


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


Key = TypeVar("Key", bound=Hashable)


def grouped(
    entries: Iterable[tuple[Tensor, Key]], most: int | None = None
) -> Iterator[tuple[Key, list[int]]]:
    """Numbers of the entries of each bucket, in order.

    Args:
        entries: a tensor, and what all tensors of its bucket have in common.
        most: elements of a bucket, default: `BUCKET_ELEMENTS`.
    """
    open_ones: dict[Key, tuple[list[int], int]] = {}
    for number, (tensor, key) in enumerate(entries):
        size = _padded(tensor.size)
        taken, filled = open_ones.get(key, ([], 0))
        if taken and filled + size > (most or BUCKET_ELEMENTS):
            yield key, taken
            taken, filled = [], 0
        open_ones[key] = [*taken, number], filled + size
    for key, (taken, _) in open_ones.items():
        yield key, taken


def fill_gradient(tensor: Tensor) -> None:
    """Give a tensor without a gradient one of zeros; also each tensor of a flat bucket."""
    bucket = getattr(tensor, "bucket", None)
    if bucket is not None:
        bucket.fill()
    elif gradient_of(tensor) is None:
        tensor.grad = paddle.zeros_like(tensor)
