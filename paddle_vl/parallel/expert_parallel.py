"""Expert parallelism: each process of a group holds some of the experts, and all rows travel.

A row goes to the process of each of its experts and comes back; between the two, products are those
of one device. The group is made of processes with different samples (a part of the dp axis), so an
expert sees the rows of all of them: its gradient is complete over the group, and is summed over the
processes that hold the same experts only.

How many rows go where is read on the host, once per layer and pass, as exchanges of uneven size
need it; nothing else is.

Shapes: N assignments of this process's rows, sorted by expert; S processes of the group; E experts
in all, H of them here.
"""

from collections.abc import Callable

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.experts import Experts, reorder_rows
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.parallel.mp_ops import gathered
from paddle_vl.parallel.tensor import FleetPlacement


class RowExchange:
    """Runs a process's experts on the rows that all processes of the group send it."""

    def __init__(self, group, num_experts: int):
        self.group, self.num_held = group, num_experts // group.nranks

    def __call__(
        self, run: Callable[[Tensor, Tensor], Tensor], x_ND: Tensor, counts_E: Tensor
    ) -> Tensor:
        """What the rows' experts make of them, in the rows' order.

        Args:
            run: this process's experts, of rows that lie together by expert and their `[H]` counts.
            x_ND: this process's rows, sorted by expert.
            counts_E: int64, how many of them each expert has.
        """
        size, rank = self.group.nranks, self.group.rank
        counts_SE = gathered(counts_E.unsqueeze(0), self.group).numpy()
        counts_SSH = counts_SE.reshape([size, size, self.num_held])
        leaving, arriving_SH = counts_SSH[rank].sum(axis=1), counts_SSH[:, rank]
        arriving = arriving_SH.sum(axis=1)
        order, inverse = _by_expert(arriving_SH)
        x_RD = _Exchange.apply(x_ND, leaving.tolist(), arriving.tolist(), self.group)
        counts_H = arriving_SH.sum(axis=0)
        # Paddle's kernels fail on no rows at all: the last expert always has one of zeros.
        counts_H[-1] += 1
        x_RD = paddle.concat([reorder_rows(x_RD, order, inverse), paddle.zeros_like(x_ND[:1])])
        y_RD = run(x_RD, paddle.to_tensor(counts_H))[:-1]
        y_RD = reorder_rows(y_RD, inverse, order)
        return _Exchange.apply(y_RD, arriving.tolist(), leaving.tolist(), self.group)


def _by_expert(arriving_SH: np.ndarray) -> tuple[Tensor, Tensor]:
    """From rows that lie by process and then by expert to rows by expert, and back: int64 each."""
    expert_R = np.tile(np.arange(arriving_SH.shape[1]), len(arriving_SH)).repeat(
        arriving_SH.reshape(-1)
    )
    order_R = np.argsort(expert_R, kind="stable")
    return paddle.to_tensor(order_R), paddle.to_tensor(np.argsort(order_R, kind="stable"))


class _Exchange(PyLayer):
    """Consecutive rows to each process of the group; their gradients come back the same way."""

    @staticmethod
    def forward(ctx, x_ND, leaving, arriving, group):
        ctx.sizes, ctx.group = (leaving, arriving), group
        return _exchanged(x_ND, leaving, arriving, group)

    @staticmethod
    def backward(ctx, grad_RD):
        leaving, arriving = ctx.sizes
        return _exchanged(grad_RD, arriving, leaving, ctx.group)


def _exchanged(x_ND: Tensor, leaving: list[int], arriving: list[int], group) -> Tensor:
    rows = paddle.empty([sum(arriving), x_ND.shape[1]], dtype=x_ND.dtype)
    dist.alltoall_single(rows, x_ND.contiguous(), leaving, arriving, group=group)
    return rows


class _ExpertParallel(SingleDevicePlacement):
    """What a placement does differently when experts are spread over a group."""

    ep_group = None

    def experts(self, num_experts: int, width: int, inner: int, init_std: float = 0.02) -> Experts:
        size = self.ep_group.nranks
        if num_experts % size:
            raise ValueError(
                f"text_config.num_experts {num_experts} does not divide by parallel.ep_degree "
                f"{size}: every process holds equally many; choose another ep_degree"
            )
        experts = super().experts(num_experts // size, width, inner, init_std)
        experts.num_experts = num_experts
        experts.exchange = RowExchange(self.ep_group, num_experts)
        for parameter in experts.parameters():
            parameter.is_expert = True
        return experts

    @property
    def splits_parameters(self) -> bool:
        return True

    @property
    def layers_are_collective(self) -> bool:
        return True

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        first, *others = super().whole_shape(parameter)
        return (first * (self.ep_group.nranks if is_expert(parameter) else 1), *others)

    def own_part(self, parameter: Tensor, whole: np.ndarray) -> np.ndarray:
        if is_expert(parameter):
            whole = np.split(whole, self.ep_group.nranks)[self.ep_group.rank]
        return super().own_part(parameter, whole)

    def whole_value(
        self, parameter: Tensor, value: Tensor | None = None, copy: bool = True
    ) -> np.ndarray:
        held = super().whole_value(parameter, value, copy)
        if not is_expert(parameter):
            return held
        parts: list[Tensor] = []
        dist.all_gather(parts, paddle.to_tensor(held), group=self.ep_group)
        return np.concatenate([part.numpy() for part in parts])


class ExpertPlacement(_ExpertParallel):
    """Experts spread over a group, everything else whole."""

    def __init__(self, ep_group, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ep_group = ep_group


class FleetExpertPlacement(_ExpertParallel, FleetPlacement):
    """Experts spread over a group, and all of a rank's layers split over a model-parallel group."""

    def __init__(self, ep_group, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ep_group = ep_group


def is_expert(tensor: Tensor) -> bool:
    """Whether only some processes of the dp axis hold this parameter or its trained tensor."""
    return getattr(tensor, "is_expert", False)
