"""Paddle's collectives and fleet on CPU processes, with the gaps of its gloo backend filled.

Guarantees, at 2 and at 4 processes: every collective gives what NumPy gives, for each operation,
dtype, stride and size and in the variants that fleet calls; messages between two members of a
larger group leave its later collectives in step, and both directions may be sent at once; groups
that ranks make at the same time all work; fleet's tensor-parallel primitives and layers give a
plain computation's results and gradients; a pipeline trains and recomputes.

A launch of a few seconds runs all checks of one number of processes; a check makes its own
assertions in every rank.
"""

import os
from collections.abc import Callable
from functools import partial

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
import pytest
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_layers, mp_ops
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication as pp_p2p
from paddle.distributed.fleet.utils import hybrid_parallel_util

from paddle_vl.parallel.gloo_fleet import install
from tests.launch import launch, outcome_of, run_checks

Op = dist.ReduceOp
IN_NUMPY = {
    Op.SUM: lambda rows: rows.sum(axis=0),
    Op.MAX: lambda rows: rows.max(axis=0),
    Op.MIN: lambda rows: rows.min(axis=0),
    Op.PROD: lambda rows: rows.prod(axis=0),
    Op.AVG: lambda rows: rows.sum(axis=0) / len(rows),
}
OP_NAMES = {Op.SUM: "sum", Op.MAX: "max", Op.MIN: "min", Op.PROD: "prod", Op.AVG: "avg"}
FLOATS = ("float32", "float64", "bfloat16", "float16")
INTEGERS = ("int64", "int32", "int8", "uint8")
NOW_OR_TASK = {"task": False, "on_calc_stream": True}

CHECKS: dict[str, Callable] = {}


def check(**variants):
    """Add a function to CHECKS, once for each variant: its name and its first argument."""

    def register(function):
        name = function.__name__
        if not variants:
            CHECKS[name] = function
        for variant, argument in variants.items():
            CHECKS[f"{name}-{variant}"] = partial(function, argument)
        return function

    return register


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def tensor(values, dtype: str = "float32") -> paddle.Tensor:
    return paddle.to_tensor(np.asarray(values, "float32")).astype(dtype)


def rows_of_ranks(*shape: int, low: int = 1, high: int = 4, ranks: int | None = None) -> np.ndarray:
    """[ranks, *shape] whole numbers, the same array in every rank: sums of them are exact."""
    generator = np.random.default_rng(sum(shape))
    return generator.integers(low, high, (ranks or size(), *shape)).astype("float32")


def assert_equal(found: paddle.Tensor, expected) -> None:
    """Bit for bit, after rounding the expected numbers to the dtype that was found."""
    expected = paddle.to_tensor(np.asarray(expected)).astype(found.dtype).astype("float64")
    np.testing.assert_array_equal(found.astype("float64").numpy(), expected.numpy())


@check(**{f"{OP_NAMES[op]}-{dtype}": (op, dtype) for op in IN_NUMPY for dtype in FLOATS})
def all_reduce(variant):
    op, dtype = variant
    x = rows_of_ranks(2, 3)
    result = tensor(x[rank()], dtype)
    dist.all_reduce(result, op)
    assert_equal(result, IN_NUMPY[op](x))


@check(**{f"{OP_NAMES[op]}-{t}": (op, t) for op in IN_NUMPY if op != Op.AVG for t in INTEGERS})
def all_reduce_integers(variant):
    all_reduce(variant)


@check()
def all_reduce_of_booleans():
    result = paddle.to_tensor([rank() == 1, False])
    dist.all_reduce(result, Op.MAX)
    assert result.tolist() == [True, False]


@check()
def all_reduce_on_calc_stream():
    x = rows_of_ranks(3)
    result = tensor(x[rank()])
    dist.stream.all_reduce(result, Op.AVG, use_calc_stream=True)
    assert_equal(result, x.sum(axis=0) / np.float32(size()))


@check()
def bfloat16_sums_round_once():
    # 256 + 1 is 256 in bfloat16: rounding after each rank would lose every 1.
    result = tensor([256.0 if rank() == 0 else 1.0], "bfloat16")
    dist.all_reduce(result)
    assert_equal(result, [256.0 + size() - 1])


@check(column_slice=lambda x: x[:, 1:3], transposed=lambda x: x.transpose([1, 0]))
def all_reduce_of_a_view_writes_through_it(view):
    x = rows_of_ranks(3, 4)
    base = tensor(x[rank()])
    part = view(base)
    assert not part.is_contiguous()
    dist.all_reduce(part)
    expected = x[rank()].copy()
    # NumPy has the method under the same name, but not its argument.
    expected_part = expected[:, 1:3] if part.shape == [3, 2] else expected.T
    expected_part[...] = x.sum(axis=0)[:, 1:3] if part.shape == [3, 2] else x.sum(axis=0).T
    assert_equal(part, expected_part)
    assert_equal(base, expected)


@check()
def average_of_integers_is_refused():
    with pytest.raises(ValueError, match=r"AVG got a tensor of paddle\.int64"):
        dist.all_reduce(paddle.ones([2], "int64"), Op.AVG)


@check()
def unknown_dtype_is_refused():
    with pytest.raises(ValueError, match=r"paddle\.int16; on CPU processes they take float16"):
        dist.all_reduce(paddle.ones([2], "int16"))


@check(first=0, last=-1)
def reduce(dst):
    dst = dst % size()
    x = rows_of_ranks(2, 2)
    for on_calc_stream in NOW_OR_TASK.values():
        result = tensor(x[rank()], "bfloat16")
        dist.stream.reduce(result, dst, sync_op=True, use_calc_stream=on_calc_stream)
        assert_equal(result, x.sum(axis=0) if rank() == dst else x[rank()])


@check(**{dtype: dtype for dtype in (*FLOATS, *INTEGERS)})
def all_gather(dtype):
    x = rows_of_ranks(2, 3)
    parts = []
    dist.all_gather(parts, tensor(x[rank()], dtype))
    assert_equal(paddle.stack(parts), x)
    for on_calc_stream in NOW_OR_TASK.values():
        joined = paddle.empty([2 * size(), 3], dtype)
        dist.stream.all_gather(joined, tensor(x[rank()], dtype), use_calc_stream=on_calc_stream)
        assert_equal(joined, x.reshape(-1, 3))
        parts = [paddle.empty([2, 3], dtype) for _ in range(size())]
        dist.stream.all_gather(parts, tensor(x[rank()], dtype), use_calc_stream=on_calc_stream)
        assert_equal(paddle.stack(parts), x)


@check()
def all_gather_of_a_view():
    x = rows_of_ranks(3, 4)
    joined = paddle.zeros([2, 3 * size()])
    dist.stream.all_gather(joined.transpose([1, 0]), tensor(x[rank()])[:, 1:3])
    assert_equal(joined, x[:, :, 1:3].reshape(-1, 2).T)


@check(**NOW_OR_TASK)
def reduce_scatter(on_calc_stream):
    x = rows_of_ranks(2 * size(), 3)
    own = slice(2 * rank(), 2 * rank() + 2)
    for op in (Op.SUM, Op.MAX, Op.AVG):
        for dtype in ("float32", "bfloat16"):
            whole = tensor(x[rank()], dtype)
            expected = IN_NUMPY[op](x)[own]
            out = paddle.empty([2, 3], dtype)
            dist.stream.reduce_scatter(out, whole, op, use_calc_stream=on_calc_stream)
            assert_equal(out, expected)
            parts = list(paddle.split(whole, size()))
            out = paddle.empty([2, 3], dtype)
            dist.stream.reduce_scatter(out, parts, op, use_calc_stream=on_calc_stream)
            assert_equal(out, expected)
            assert_equal(whole, x[rank()])


@check()
def reduce_scatter_average_by_its_plain_name():
    x = rows_of_ranks(size())
    out = paddle.empty([1])
    dist.reduce_scatter(out, tensor(x[rank()]), Op.AVG)
    assert_equal(out, (x.sum(axis=0) / np.float32(size()))[rank() : rank() + 1])


@check()
def reduce_scatter_into_its_own_input():
    x = rows_of_ranks(size(), 2)
    whole = tensor(x[rank()])
    dist.stream.reduce_scatter(whole[rank() : rank() + 1], whole)
    assert_equal(whole[rank()], x.sum(axis=0)[rank()])


@check(**NOW_OR_TASK)
def all_to_all(on_calc_stream):
    x = rows_of_ranks(size(), 2, 3)
    out = [paddle.empty([2, 3]) for _ in range(size())]
    dist.stream.alltoall(out, list(tensor(x[rank()])), use_calc_stream=on_calc_stream)
    assert_equal(paddle.stack(out), x[:, rank()])
    out = paddle.empty([size(), 2, 3])
    dist.stream.alltoall(out, tensor(x[rank()]), use_calc_stream=on_calc_stream)
    assert_equal(out, x[:, rank()])


def message(source: int, target: int, width: int = 3) -> np.ndarray:
    """Rows of rank `source` for rank `target`: their number depends on both, none for some."""
    rows = (source + 2 * target) % 3
    return np.full([rows, width], 10.0 * source + target) + np.arange(width)


@check(**NOW_OR_TASK)
def all_to_all_of_uneven_parts(on_calc_stream):
    expected = [message(source, rank()) for source in range(size())]
    sent = [message(rank(), target) for target in range(size())]
    out = [paddle.empty(part.shape) for part in expected]
    parts = [tensor(part) for part in sent]
    dist.stream.alltoall(out, parts, use_calc_stream=on_calc_stream)
    for part, wanted in zip(out, expected, strict=True):
        assert_equal(part, wanted)
    joined = paddle.empty([sum(map(len, expected)), 3])
    dist.stream.alltoall_single(
        joined,
        tensor(np.concatenate(sent)),
        [len(part) for part in expected],
        [len(part) for part in sent],
        use_calc_stream=on_calc_stream,
    )
    assert_equal(joined, np.concatenate(expected))


@check()
def all_to_all_single_of_even_parts():
    x = rows_of_ranks(2 * size(), 2)
    out = paddle.empty([2 * size(), 2])
    dist.alltoall_single(out, tensor(x[rank()]))
    assert_equal(out, x[:, 2 * rank() : 2 * rank() + 2].reshape(-1, 2))


@check()
def all_to_all_of_sizes_that_do_not_fit_is_refused():
    out = [paddle.empty([2]) for _ in range(size())]
    with pytest.raises(ValueError, match="sends rank . 3 elements, and its place there has 2"):
        dist.alltoall(out, [paddle.ones([3]) for _ in range(size())])


@check(**{dtype: dtype for dtype in ("float32", "bfloat16", "float16", "int64", "bool")})
def broadcast(dtype):
    x = rows_of_ranks(2, 3, low=0, high=2)
    for src in range(size()):
        for on_calc_stream in NOW_OR_TASK.values():
            result = tensor(x[rank()], dtype)
            dist.stream.broadcast(result, src, use_calc_stream=on_calc_stream)
            assert_equal(result, x[src])
    base = tensor(x[rank()], dtype)
    dist.broadcast(base[:, 1:], 1)
    assert_equal(base[:, 1:], x[1][:, 1:])


@check(**NOW_OR_TASK)
def scatter(on_calc_stream):
    x = rows_of_ranks(size(), 3)
    for src in (0, size() - 1):
        parts = list(tensor(x[src])) if rank() == src else []
        out = paddle.empty([3])
        dist.stream.scatter(out, parts, src, use_calc_stream=on_calc_stream)
        assert_equal(out, x[src][rank()])
        out = paddle.empty([1, 3])
        dist.stream.scatter(out, tensor(x[src]), src, use_calc_stream=on_calc_stream)
        assert_equal(out, x[src][rank()][None])


@check()
def gather():
    x = rows_of_ranks(2, 3)
    parts = [paddle.empty([2, 3]) for _ in range(size())] if rank() == 1 else []
    dist.gather(tensor(x[rank()]), parts, dst=1)
    if rank() == 1:
        assert_equal(paddle.stack(parts), x)


@check()
def objects():
    found = []
    dist.all_gather_object(found, {"rank": rank(), "text": "x" * rank()})
    assert found == [{"rank": each, "text": "x" * each} for each in range(size())]
    shared = [["of", rank()]]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [["of", 1]]


@check()
def empty_tensors():
    nothing = paddle.zeros([0, 3])
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    dist.reduce(nothing, 0)
    for result, collective in (
        (paddle.zeros([0, 3]), dist.stream.all_gather),
        (paddle.zeros([0, 3]), dist.stream.reduce_scatter),
        (paddle.zeros([0, 3]), dist.stream.alltoall),
    ):
        collective(result, nothing)
        assert result.shape == [0, 3]
    if rank() == 0:
        dist.send(nothing, 1)
    elif rank() == 1:
        dist.recv(nothing, 0)
    assert nothing.shape == [0, 3]
    still_in_step()


def still_in_step() -> None:
    x = rows_of_ranks(5)
    result = tensor(x[rank()])
    dist.all_reduce(result)
    assert_equal(result, x.sum(axis=0))


@check(**NOW_OR_TASK)
def messages_leave_the_group_in_step(on_calc_stream):
    first, last = 0, size() - 1
    for source, target in ((first, last), (last, first), (first, 1)):
        x = message(source, target + 1, width=4) + 1
        if rank() == source:
            dist.stream.send(tensor(x)[:, 1:3], target, use_calc_stream=on_calc_stream)
        elif rank() == target:
            base = paddle.zeros(x.shape)
            dist.stream.recv(base[:, 1:3], source, use_calc_stream=on_calc_stream)
            x[:, [0, 3]] = 0
            assert_equal(base, x)
        still_in_step()


@check()
def every_pair_exchanges():
    for low in range(size()):
        for high in range(low + 1, size()):
            for source, target in ((low, high), (high, low)):
                if rank() == source:
                    dist.send(tensor([source, target], "bfloat16"), target)
                elif rank() == target:
                    received = paddle.zeros([2], "bfloat16")
                    dist.recv(received, source)
                    assert_equal(received, [source, target])
    still_in_step()


@check(sends_first=False, receives_first=True)
def ring_of_batched_messages(reverse):
    before, after = (rank() - 1) % size(), (rank() + 1) % size()
    # Both directions and two messages in one of them.
    from_before = [paddle.zeros([2]), paddle.zeros([3])]
    from_after = paddle.zeros([1])
    operations = [
        dist.P2POp(dist.isend, paddle.full([2], float(rank())), after),
        dist.P2POp(dist.isend, paddle.full([3], 10.0 + rank()), after),
        dist.P2POp(dist.irecv, from_before[0], before),
        dist.P2POp(dist.irecv, from_before[1], before),
    ]
    if size() > 2:
        operations += [
            dist.P2POp(dist.isend, paddle.full([1], 20.0 + rank()), before),
            dist.P2POp(dist.irecv, from_after, after),
        ]
    if reverse:
        operations = operations[2:] + operations[:2]
    for task in dist.batch_isend_irecv(operations):
        task.wait()
    assert_equal(from_before[0], [before] * 2)
    assert_equal(from_before[1], [10 + before] * 3)
    if size() > 2:
        assert_equal(from_after, [20 + after])
    still_in_step()


@check()
def partial_messages_and_their_gather():
    group = dist.collective._get_default_group().process_group
    x = rows_of_ranks(size(), 2)[0]
    if rank() == 0:
        group.send_partial_on_calc_stream(tensor(x), 1, size(), 1)
    elif rank() == 1:
        received = paddle.zeros(x.shape)
        group.recv_partial_on_calc_stream(received, 0, size(), 1)
        expected = np.zeros_like(x)
        expected[1] = x[1]
        assert_equal(received, expected)
    own_row = paddle.zeros(x.shape)
    own_row[rank()] = tensor(x[rank()])
    group.all_gather_partial_on_calc_stream(own_row, own_row, size(), rank())
    assert_equal(own_row, x)


@check()
def stages_send_to_each_other_at_once():
    if rank() > 1:
        return
    group, peer = dist.collective._get_default_group(), 1 - rank()
    received = paddle.zeros([2])
    pp_p2p.batch_send_recv_on_calc_stream(
        [
            pp_p2p.P2PonCalcStream(pp_p2p._send_on_calc_stream, tensor([rank(), 7.0]), peer, group),
            pp_p2p.P2PonCalcStream(pp_p2p._recv_on_calc_stream, received, peer, group),
        ]
    )
    assert_equal(received, [peer, 7])


@check()
def fleet_makes_the_groups_of_the_hybrid_degrees():
    hcg = fleet.get_hybrid_communicate_group()
    model, data = hcg.get_model_parallel_group(), hcg.get_data_parallel_group()
    assert (model.nranks, data.nranks) == (2, size() // 2)
    assert model.ranks == [rank() // 2 * 2, rank() // 2 * 2 + 1]
    assert data.ranks == list(range(rank() % 2, size(), 2))
    for group in (model, data):
        if group.nranks > 1:
            total = tensor([rank()])
            dist.all_reduce(total, group=group)
            assert_equal(total, [sum(group.ranks)])


@check()
def groups_made_at_the_same_time_all_work():
    whole = list(range(size()))
    for _ in range(3):
        groups = [dist.new_group(ranks) for ranks in (whole[::2], whole[1::2], whole[::-1], [0, 1])]
        for group in groups:
            if group.is_member() and group.nranks > 1:
                total = tensor([rank()])
                dist.all_reduce(total, group=group)
                assert_equal(total, [sum(group.ranks)])


@check()
def messages_in_a_subgroup_name_global_ranks():
    ranks = list(range(size()))[-2:] if size() > 2 else [0, 1]
    group = dist.new_group(ranks)
    if rank() == ranks[0]:
        dist.send(tensor([5.0]), ranks[1], group=group)
    elif rank() == ranks[1]:
        received = paddle.zeros([1])
        dist.recv(received, ranks[0], group=group)
        assert_equal(received, [5])


def whole_group():
    return dist.collective._get_default_group()


def with_gradient(values) -> paddle.Tensor:
    result = tensor(values)
    result.stop_gradient = False
    return result


@check()
def identity_primitive():
    x, weights = rows_of_ranks(2, 3), rows_of_ranks(3, 2)
    inputs = with_gradient(x[0])
    output = mp_ops._c_identity(inputs, group=whole_group())
    (output * tensor(weights[rank()].T)).sum().backward()
    assert_equal(output, x[0])
    assert_equal(inputs.grad, weights.sum(axis=0).T)


@check()
def all_reduce_primitive():
    x, weights = rows_of_ranks(2, 3), rows_of_ranks(3, 2)[0].T
    inputs = with_gradient(x[rank()])
    output = mp_ops._mp_allreduce(inputs * 1.0, group=whole_group())
    (output * tensor(weights)).sum().backward()
    assert_equal(output, x.sum(axis=0))
    assert_equal(inputs.grad, weights)


@check()
def split_primitive():
    x, weights = rows_of_ranks(2, 2 * size())[0], rows_of_ranks(2 * size(), 2)[0].T
    own = slice(2 * rank(), 2 * rank() + 2)
    inputs = with_gradient(x)
    output = mp_ops._c_split(inputs, group=whole_group())
    (output * tensor(weights[:, own])).sum().backward()
    assert_equal(output, x[:, own])
    assert_equal(inputs.grad, weights)


@check()
def concat_primitive():
    x, weights = rows_of_ranks(2, 2 * size())[0], rows_of_ranks(2 * size(), 2)[0].T
    own = slice(2 * rank(), 2 * rank() + 2)
    inputs = with_gradient(x[:, own])
    output = mp_ops._c_concat(inputs, group=whole_group())
    (output * tensor(weights)).sum().backward()
    assert_equal(output, x)
    assert_equal(inputs.grad, weights[:, own])


@check(flat_labels=False, label_column=True)
def cross_entropy_over_a_divided_vocabulary(column):
    per_rank, ignored = 5, -7
    generator = np.random.default_rng(0)
    logits = 4 * generator.standard_normal((2, 6, per_rank * size())).astype("float32")
    labels = generator.integers(0, per_rank * size(), (2, 6))
    labels[0, 2] = labels[1, 5] = ignored
    weights = generator.random((2, 6)).astype("float32")
    plain = with_gradient(logits)
    expected = F.cross_entropy(
        plain, paddle.to_tensor(labels), reduction="none", ignore_index=ignored
    ).reshape([2, 6])
    (expected * tensor(weights)).sum().backward()

    own = slice(per_rank * rank(), per_rank * (rank() + 1))
    part = with_gradient(logits[..., own])
    label = paddle.to_tensor(labels[..., None] if column else labels)
    loss, softmax = mp_ops._c_softmax_with_cross_entropy(
        part, label, whole_group(), return_softmax=True, ignore_index=ignored
    )
    (loss.squeeze(-1) * tensor(weights)).sum().backward()
    assert loss.shape == [2, 6, 1]
    assert loss[0, 2].item() == loss[1, 5].item() == 0
    close = partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-6)
    close(loss.squeeze(-1).numpy(), expected.numpy())
    close(softmax.numpy(), F.softmax(plain).numpy()[..., own])
    close(part.grad.numpy(), plain.grad.numpy()[..., own])
    assert not part.grad[0, 2].numpy().any()


@check()
def fleet_layers_equal_plain_ones():
    """Embedding, column- and row-parallel linear and cross entropy of fleet's model group."""
    vocabulary, width, wide = 8, 4, 6
    group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
    generator = np.random.default_rng(1)
    table, up, down = (
        generator.standard_normal(shape).astype("float32")
        for shape in ((vocabulary, width), (width, wide), (wide, vocabulary))
    )
    ids, labels = generator.integers(0, vocabulary, (2, 2, 5))
    embedding = mp_layers.VocabParallelEmbedding(vocabulary, width, mp_group=group)
    columns = mp_layers.ColumnParallelLinear(
        width, wide, has_bias=False, gather_output=True, mp_group=group
    )
    rows = mp_layers.RowParallelLinear(wide, vocabulary, has_bias=False, mp_group=group)
    part = group.rank
    embedding.weight.set_value(np.split(table, 2)[part])
    columns.weight.set_value(np.split(up, 2, axis=1)[part])
    rows.weight.set_value(np.split(down, 2)[part])
    logits = rows(columns(embedding(paddle.to_tensor(ids))))
    loss = mp_layers.ParallelCrossEntropy(mp_group=group)(
        mp_ops._c_split(logits, group=group), paddle.to_tensor(labels)
    )
    loss.sum().backward()

    plain = [with_gradient(each) for each in (table, up, down)]
    plain_logits = F.embedding(paddle.to_tensor(ids), plain[0]) @ plain[1] @ plain[2]
    plain_loss = F.cross_entropy(plain_logits, paddle.to_tensor(labels), reduction="none")
    plain_loss.sum().backward()
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(loss.numpy().reshape(-1), plain_loss.numpy().reshape(-1))
    grads = [each.grad.numpy() for each in plain]
    close(embedding.weight.grad.numpy(), np.split(grads[0], 2)[part])
    close(columns.weight.grad.numpy(), np.split(grads[1], 2, axis=1)[part])
    close(rows.weight.grad.numpy(), np.split(grads[2], 2)[part])


@check()
def input_broadcast_gives_a_model_group_the_first_ranks_input():
    hcg = fleet.get_hybrid_communicate_group()
    # Another length on each rank.
    x, nested = tensor([rank(), 2.0, 3.0][: 3 - rank() % 2]), tensor([10.0 + rank()])
    hybrid_parallel_util.broadcast_input_data(hcg, x, {"nested": [nested]})
    first = rank() // 2 * 2
    assert_equal(x, [first, 2, 3])
    assert_equal(nested, [10 + first])


@check()
def installing_again_changes_nothing():
    def patched():
        group = paddle.base.core.ProcessGroupGloo
        return group.all_reduce, dist.collective._new_process_group_impl, mp_ops._c_split

    before = patched()
    assert install()
    assert patched() == before


def collectives_worker() -> dict:
    degrees = {"dp_degree": size_asked_for() // 2, "mp_degree": 2, "pp_degree": 1}
    start_fleet(degrees)
    return run_checks(CHECKS)


def size_asked_for() -> int:
    return int(os.environ["PADDLE_TRAINERS_NUM"])


def start_fleet(degrees: dict, pipeline_configs: dict | None = None) -> None:
    assert install()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = degrees
    if pipeline_configs is not None:
        strategy.pipeline_configs = pipeline_configs
    fleet.init(is_collective=True, strategy=strategy)


@pytest.fixture(scope="module", params=[2, 4], ids=["2_processes", "4_processes"])
def outcomes(request):
    return launch(collectives_worker, processes=request.param)


@pytest.mark.parametrize("name", CHECKS)
def test_on_processes(outcomes, name):
    outcome_of(outcomes, name)


WIDTH, ROWS, MICRO_BATCHES, STEPS = 4, 3, 4, 2


class Block(paddle.nn.Layer):
    """Counts its calls: recomputation calls it again in the backward pass."""

    calls = 0

    def __init__(self, number: int):
        super().__init__()
        self.linear = paddle.nn.Linear(WIDTH, WIDTH)
        generator = np.random.default_rng(number)
        self.linear.weight.set_value(generator.standard_normal((WIDTH, WIDTH)).astype("float32"))

    def forward(self, x):
        Block.calls += 1
        return paddle.tanh(self.linear(x))


def squared_error(output, target):
    return ((output - target) ** 2).mean()


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(9)
    shape = (STEPS, 2, MICRO_BATCHES * ROWS, WIDTH)
    return [tuple(pair) for pair in generator.standard_normal(shape).astype("float32")]


def pipeline_worker(batched: bool) -> tuple[list[float], int]:
    """Losses of a two-stage pipeline that recomputes, and the calls of this stage's two layers."""
    degrees = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 2}
    start_fleet(
        degrees | {"pp_configs": {"use_batch_p2p_comm": batched}},
        pipeline_configs={"accumulate_steps": MICRO_BATCHES, "micro_batch_size": ROWS},
    )
    hcg = fleet.get_hybrid_communicate_group()
    layers = PipelineLayer(
        [LayerDesc(Block, number) for number in range(4)],
        num_stages=2,
        loss_fn=squared_error,
        recompute_interval=1,
        recompute_ctx={"mp_group": hcg.get_model_parallel_group()},
    )
    model = fleet.distributed_model(layers)
    optimizer = fleet.distributed_optimizer(
        paddle.optimizer.SGD(0.1, parameters=layers.parameters())
    )
    data = [[tensor(x), tensor(y)] for x, y in batches()]
    return [model.train_batch(each, optimizer).item() for each in data], Block.calls


def losses_on_one_device() -> list[float]:
    model = paddle.nn.Sequential(*[Block(number) for number in range(4)])
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    losses = []
    for x, y in batches():
        loss = squared_error(model(tensor(x)), tensor(y))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("batched", [False, True], ids=["one_by_one", "batched_messages"])
def test_pipeline_with_recomputation_trains_as_one_device(batched):
    results = launch(pipeline_worker, processes=2, arguments=[batched])
    expected = losses_on_one_device()
    assert expected[1] != expected[0]
    for losses, calls in results:
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
        # The layer that gets the data itself has no gradient to give back and is not recomputed.
        assert calls > 2 * MICRO_BATCHES * STEPS
