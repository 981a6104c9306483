"""Mixture of experts: a gated MLP per expert, applied to the token rows that were routed to it.

Shapes: T token rows of a batch, R of them routed; K experts of each; N = R * K assignments of a row
to an expert, numbered `r * K + k`; E experts; D width; I features in, O features out of a product.

Padding is not routed: its rows are left out before the router and get zeros from the experts.

The assignments are sorted by expert, so that the rows of one expert are contiguous. In eager mode
the gradient of a permutation is the inverse permutation, a gather; a scatter would add values in an
order that may change from run to run. Shapes depend on R only, and on a GPU the host reads nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import paddle
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.nn.initializer import Normal

from paddle_vl.nn.dispatch import operation
from paddle_vl.nn.operations import swiglu

Plan = TypeVar("Plan")


class Dispatch(NamedTuple):
    """The permutation that sorts assignments by expert, all int64.

    Attributes:
        order: `[N]`, the assignment at each place of the sorted rows; ascending within an expert.
            With holes it is longer, and N at places of no assignment.
        place: `[N]`, the place of each assignment among the sorted rows: the inverse of `order`.
        counts: `[E]`, number of rows of each expert.
        has_holes: whether there are such places; their rows are zeros, without a gradient.
    """

    order: Tensor
    place: Tensor
    counts: Tensor
    has_holes: bool = False


class GroupSizes:
    """How many consecutive rows each expert has; one object for all products of a layer.

    Not a tuple, which Paddle would search for tensors.

    Args:
        counts_E: int64.
        on_host: the same numbers, where the host has them anyway.
        may_read: whether a kernel that needs them on the host may read them. Otherwise there may be
            rows of zeros behind those counted, which have no expert and get zeros.

    Attributes:
        layout: what a kernel derives from the counts, kept for the layer's other products.
    """

    def __init__(self, counts_E: Tensor, on_host: list[int] | None = None, may_read: bool = True):
        self.counts_E, self.on_host, self.may_read = counts_E, on_host, may_read
        self.layout: Any = None


class ExpertCapacity:
    """Room for a micro-batch's rows between each two ranks that share experts, in place of exact
    sizes, so that the host reads none. An overflow makes the results useless: the step is repeated.

    Not a tuple, which Paddle would search for tensors.

    Args:
        num_rows: rows that a rank has room to route if its ranks get equally many.

    Attributes:
        overflows: bool scalars on the device, of every layer that has run: whether this rank had
            more rows for a rank than there is room for.
    """

    def __init__(self, num_rows: int):
        self.num_rows, self.overflows = num_rows, list[Tensor]()

    def room(self, copies: int, num_ranks: int) -> int:
        """Rows from a rank to another, `copies` of each routed row; at least 1."""
        return max(-(-self.num_rows * copies // num_ranks), 1)


class RoutingPlan(NamedTuple):
    """Where a layer's rows go.

    Attributes:
        indices: `[R, K]` int64, the experts of each row.
        dispatch: the same, sorted by expert.
        sizes: the rows of each expert.
        exchange: the plan of `Experts.exchange`; None without expert parallelism.
    """

    indices: Tensor
    dispatch: Dispatch
    sizes: GroupSizes
    exchange: Any = None


class RoutedRows:
    """The token rows of a micro-batch that go to experts, and the plans of its layers.

    One object for all layers of a forward pass. A layer that is recomputed takes the plan of its
    first pass: it chooses the same experts, sorts nothing, and the ranks of an expert-parallel
    group neither send sizes nor read them on the host again.

    Not a tuple, which Paddle would search for tensors.

    Args:
        num_rows: T.
        index_R: int64, the rows that are not padding, ascending; None for all rows.
        num_real: default: of these rows.
        capacity: of expert parallelism; None for exact sizes.

    Attributes:
        num_real: number of rows of the batch that are not padding, of other ranks too.
        is_empty: whether none of these rows is real.
        index_R: rows to route; None for all. Paddle's kernels fail on zero rows, so of a batch of
            padding the first row is routed; it changes no output, no gradient and no count.
    """

    def __init__(
        self,
        num_rows: int,
        index_R: Tensor | None = None,
        num_real: int | None = None,
        capacity: ExpertCapacity | None = None,
    ):
        self.num_rows, num_own, self.is_empty = num_rows, num_rows, False
        self.capacity = capacity
        # A traced program has all rows, whose number it does not know.
        if index_R is not None:
            num_own = index_R.shape[0]
            self.is_empty = num_own == 0
            if num_own == num_rows:
                index_R = None
            elif self.is_empty:
                index_R = paddle.zeros([1], dtype="int64")
        self.num_real = num_own if num_real is None else num_real
        self.index_R = index_R
        self._plans: dict[nn.Layer, Any] = {}

    def taken(self, x_TD: Tensor) -> Tensor:
        """The rows to route, `[R, D]`."""
        return x_TD if self.index_R is None else paddle.index_select(x_TD, self.index_R)

    def placed(self, y_RD: Tensor) -> Tensor:
        """The rows at their places among all rows, zeros at padding: `[T, D]`."""
        if self.index_R is None:
            return y_RD
        if self.is_empty:
            y_RD = y_RD * 0.0
        zeros_TD = paddle.zeros([self.num_rows, y_RD.shape[1]], dtype=y_RD.dtype)
        return paddle.scatter(zeros_TD, self.index_R, y_RD)

    def kept_plan(self, layer: nn.Layer) -> Any:
        """The plan of the layer's first pass while it is recomputed, else None."""
        return self._plans.get(layer) if paddle.is_grad_enabled() else None

    def plan(self, layer: nn.Layer, make: Callable[[], Plan]) -> Plan:
        """The layer's plan: `kept_plan`, or a new one, kept if recomputation may follow. A layer
        may have another kind of plan than experts."""
        plan = self.kept_plan(layer)
        if plan is not None:
            del self._plans[layer]
            return plan
        plan = make()
        # The first pass of a recomputed layer runs without gradients.
        if layer.training and not paddle.is_grad_enabled():
            self._plans[layer] = plan
        return plan


def sort_by_expert(indices_RK: Tensor, num_experts: int) -> Dispatch:
    """Sort assignments by expert, stably.

    Args:
        indices_RK: int64 experts of each routed row.
    """
    expert_N = indices_RK.reshape([-1])
    order_N = paddle.argsort(expert_N, stable=True)
    numbers_N = paddle.arange(expert_N.shape[0], dtype="int64")
    place_N = paddle.scatter(paddle.zeros_like(numbers_N), order_N, numbers_N)
    ends_E = paddle.searchsorted(
        paddle.index_select(expert_N, order_N),
        paddle.arange(num_experts, dtype=expert_N.dtype),
        right=True,
    )
    return Dispatch(order_N, place_N, paddle.diff(ends_E, prepend=paddle.zeros_like(ends_E[:1])))


def permute_rows(x_RD: Tensor, dispatch: Dispatch) -> Tensor:
    """Each row once for each of its experts, sorted by expert: `[N, D]`."""
    permuted = SeatRows.apply if dispatch.has_holes else permuted_copies
    return permuted(x_RD, dispatch.order, dispatch.place, dispatch.place.shape[0] // x_RD.shape[0])


def unpermute_rows(y_ND: Tensor, dispatch: Dispatch, weights_RK: Tensor) -> Tensor:
    """Weighted sum over each row's K results, in the order of `permute_rows`: `[R, D]`."""
    order_N, place_N = dispatch.order, dispatch.place
    if dispatch.has_holes:
        y_ND = UnseatRows.apply(y_ND, place_N)
    else:
        y_ND = reorder_rows(y_ND, place_N, order_N)
    y_RKD = y_ND.reshape([-1, weights_RK.shape[1], y_ND.shape[-1]])
    return paddle.matmul(weights_RK.unsqueeze(1), y_RKD).squeeze(1)


def reorder_rows(y_ND: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Row `order[i]` at place i; `inverse` is the inverse permutation."""
    return permuted_copies(y_ND, order_N, inverse_N, 1)


@operation
def permuted_copies(x_RD: Tensor, order_N: Tensor, place_N: Tensor, copies: int) -> Tensor:
    """Row `order[i] // copies` at place i; `place` is the inverse permutation of `order`."""
    return paddle.index_select(x_RD, order_N // copies)


class PermuteRows(PyLayer):
    """`permuted_copies`, whose gradient gathers by the inverse permutation."""

    @staticmethod
    def forward(ctx, x_RD, order_N, place_N, copies):
        ctx.save_for_backward(place_N)
        ctx.copies = copies
        return paddle.index_select(x_RD, order_N if copies == 1 else order_N // copies)

    @staticmethod
    def backward(ctx, grad_ND):
        (place_N,) = ctx.saved_tensor()
        grad_ND = paddle.index_select(grad_ND, place_N)
        if ctx.copies > 1:
            grad_ND = grad_ND.reshape([-1, ctx.copies, grad_ND.shape[-1]]).sum(axis=1)
        return grad_ND, None, None


class SeatRows(PermuteRows):
    """`PermuteRows` into an order with holes, which get zeros."""

    @staticmethod
    def forward(ctx, x_RD, order_C, place_N, copies):
        x_RD = paddle.concat([x_RD, paddle.zeros_like(x_RD[:1])])
        return PermuteRows.forward(ctx, x_RD, order_C, place_N, copies)


class UnseatRows(PyLayer):
    """The rows at some places, all different; the others get zeros as their gradient."""

    @staticmethod
    def forward(ctx, y_CD, place_N):
        ctx.save_for_backward(place_N)
        ctx.num_places = y_CD.shape[0]
        return paddle.index_select(y_CD, place_N)

    @staticmethod
    def backward(ctx, grad_ND):
        (place_N,) = ctx.saved_tensor()
        zeros_CD = paddle.zeros([ctx.num_places, grad_ND.shape[1]], dtype=grad_ND.dtype)
        return paddle.scatter_(zeros_CD, place_N, grad_ND), None


class GroupedProduct(PyLayer):
    """`grouped_linear` by a layout of the rows; keeps the rows and no copies of matrices.

    A layout has `product(x_NI, weight_EIO, transposed)`, each row with its expert's matrix, or with
    its transpose; and `weight_gradient(x_NI, grad_NO)`, `[E, I, O]`, the sum of `x^T @ grad` over
    each expert's rows.
    """

    @staticmethod
    def forward(ctx, x_NI, weight_EIO, layout):
        ctx.save_for_backward(x_NI, weight_EIO)
        ctx.layout, ctx.needs = layout, (not x_NI.stop_gradient, not weight_EIO.stop_gradient)
        return layout.product(x_NI, weight_EIO)

    @staticmethod
    def backward(ctx, grad_NO):
        x_NI, weight_EIO = ctx.saved_tensor()
        needs_x, needs_weight = ctx.needs
        grad_x = ctx.layout.product(grad_NO, weight_EIO, transposed=True) if needs_x else None
        grad_weight = ctx.layout.weight_gradient(x_NI, grad_NO) if needs_weight else None
        return grad_x, grad_weight


@operation
def grouped_linear(x_NI: Tensor, weight_EIO: Tensor, sizes: GroupSizes) -> Tensor:
    """`x @ weight[e]` with each row's own expert e: the first `counts_E[0]` rows have expert 0.

    One batched product whose shapes do not depend on the counts. Each expert's rows fill blocks of
    `ceil(N / E)` rows, the last one padded with zeros. E blocks more than N rows fill always
    suffice, so the product is at most twice as large as needed. Each block gets a copy of its
    expert's matrix.

    Returns:
        `[N, O]` in the dtype of the rows.
    """
    counts_E, total = sizes.counts_E, x_NI.shape[0]
    num_experts = counts_E.shape[0]
    rows = (total + num_experts - 1) // num_experts
    # The last blocks of all experts; with fewer rows than experts a block is one row.
    num_blocks = (total + num_experts * (rows - 1)) // rows
    ends_E, blocks_E = counts_E.cumsum(), (counts_E + (rows - 1)) // rows
    block_ends_E = blocks_E.cumsum()
    numbers_N = paddle.arange(total, dtype="int64")
    expert_N = paddle.searchsorted(ends_E, numbers_N, right=True).clip(max=num_experts - 1)
    shift_E = (block_ends_E - blocks_E) * rows - (ends_E - counts_E)
    place_N = numbers_N + paddle.index_select(shift_E, expert_N)
    numbers_B = paddle.arange(num_blocks, dtype="int64")
    # Unused blocks have the last expert.
    expert_B = paddle.searchsorted(block_ends_E, numbers_B, right=True).clip(max=num_experts - 1)
    empty = paddle.zeros([num_blocks * rows, x_NI.shape[1]], dtype=x_NI.dtype)
    x_BRI = paddle.scatter(empty, place_N, x_NI).reshape([num_blocks, -1, x_NI.shape[1]])
    y_BRO = paddle.matmul(x_BRI, paddle.index_select(weight_EIO, expert_B))
    return paddle.index_select(y_BRO.reshape([-1, y_BRO.shape[-1]]), place_N)


class Experts(nn.Layer):
    """`down(silu(gate(x)) * up(x))` by each row's experts, summed with the rows' weights.

    Weights are `[E, in, out]`, gate and up side by side, drawn from a normal of std `init_std`.

    Attributes:
        num_experts: E, the experts of the layer on all ranks.
        exchange: sends rows to their experts' ranks and back, see
            `paddle_vl.parallel.expert_parallel`; None without expert parallelism.
        tokens_per_expert: `[E]` int64, rows of each expert in the last forward, without padding;
            None before.
    """

    def __init__(self, num_experts: int, width: int, inner: int, init_std: float = 0.02):
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = self.create_parameter(
            [num_experts, width, 2 * inner], default_initializer=Normal(std=init_std)
        )
        self.down_proj = self.create_parameter(
            [num_experts, inner, width], default_initializer=Normal(std=init_std)
        )
        self.exchange: Any = None
        self.tokens_per_expert: Tensor | None = None

    def forward(
        self,
        x_RD: Tensor,
        indices_RK: Tensor,
        weights_RK: Tensor,
        rows: RoutedRows | None = None,
    ) -> Tensor:
        """Output of all token rows `[T, D]`, zeros at padding.

        Args:
            x_RD: the rows of `RoutedRows.taken`.
            indices_RK: their experts, int64.
            weights_RK: the weights of these, in the dtype of the rows.
            rows: which rows they are; None if no row is padding.
        """
        rows = rows or RoutedRows(x_RD.shape[0])
        return rows.placed(routed_experts(x_RD, indices_RK, weights_RK, self, rows))

    def plan(self, indices_RK: Tensor, rows: RoutedRows) -> RoutingPlan:
        """Where the routed rows go."""
        dispatch, exchange = sort_by_expert(indices_RK, self.num_experts), None
        own_E = dispatch.counts
        self.keep_counts(own_E, rows)
        if self.exchange is not None:
            copies = indices_RK.shape[1]
            dispatch, exchange = self.exchange.plan(dispatch, copies, rows.capacity)
        return RoutingPlan(indices_RK, dispatch, GroupSizes(own_E), exchange)

    def keep_counts(self, counts_E: Tensor, rows: RoutedRows) -> None:
        """Set `tokens_per_expert` to the counts of the routed rows."""
        self.tokens_per_expert = paddle.zeros_like(counts_E) if rows.is_empty else counts_E

    def run_experts(self, x_ND: Tensor, sizes: GroupSizes) -> Tensor:
        """This rank's experts applied to rows sorted by expert: `[N, D]`."""
        inner = swiglu(grouped_linear(x_ND, self.gate_up_proj, sizes))
        return grouped_linear(inner, self.down_proj, sizes)


@operation
def routed_experts(
    x_RD: Tensor, indices_RK: Tensor, weights_RK: Tensor, experts: Experts, rows: RoutedRows
) -> Tensor:
    """The rows by their experts, summed with their weights: `[R, D]`; see `Experts.forward`."""
    plan = rows.plan(experts, lambda: experts.plan(indices_RK, rows))
    x_ND = permute_rows(x_RD, plan.dispatch)
    if experts.exchange is None:
        y_ND = experts.run_experts(x_ND, plan.sizes)
    else:
        y_ND = experts.exchange(experts.run_experts, x_ND, plan.exchange)
    return unpermute_rows(y_ND, plan.dispatch, weights_RK)
