"""The table of checks and what they share: ranks, integer-valued tensors, comparison."""

from collections.abc import Callable
from functools import partial

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

from paddle_vl.parallel.gloo_fleet import install

Op = dist.ReduceOp
IN_NUMPY = {
    Op.SUM: lambda rows: rows.sum(axis=0),
    Op.MAX: lambda rows: rows.max(axis=0),
    Op.MIN: lambda rows: rows.min(axis=0),
    Op.PROD: lambda rows: rows.prod(axis=0),
}
OP_NAMES = {Op.SUM: "sum", Op.MAX: "max", Op.MIN: "min", Op.PROD: "prod"}
FLOATS = ("float32", "float64", "bfloat16", "float16")
INTEGERS = ("int64", "int32", "int8", "uint8")
NOW_OR_TASK = {"task": False, "on_calc_stream": True}

CHECKS: dict[str, Callable] = {}


def check(**variants):
    """Add a function to CHECKS, once per variant: its name and its first argument."""

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
    """[ranks, *shape] integer values, the same array on every rank, so that sums are exact."""
    generator = np.random.default_rng(sum(shape))
    return generator.integers(low, high, (ranks or size(), *shape)).astype("float32")


def assert_equal(found: paddle.Tensor, expected) -> None:
    """Compare bit for bit, with the expected numbers rounded to the found dtype."""
    expected = paddle.to_tensor(np.asarray(expected)).astype(found.dtype).astype("float64")
    np.testing.assert_array_equal(found.astype("float64").numpy(), expected.numpy())


def message(source: int, target: int, width: int = 3) -> np.ndarray:
    """Rows from rank `source` to rank `target`; some pairs have none."""
    rows = (source + 2 * target) % 3
    return np.full([rows, width], 10.0 * source + target) + np.arange(width)


def still_in_step() -> None:
    x = rows_of_ranks(5)
    result = tensor(x[rank()])
    dist.all_reduce(result)
    assert_equal(result, x.sum(axis=0))


def start_fleet(degrees: dict) -> None:
    assert install()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = degrees
    fleet.init(is_collective=True, strategy=strategy)
