"""Kernels by oneDNN against those of Paddle, forward and backward, in turn in one process.

    python tools/benchmarks/onednn.py

"Paddle" is the implementation of the same operation that runs where Paddle's wheel has no oneDNN:
Paddle's kernel, or the package's composition of kernels. C kernels are off.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor

from harness import Table, in_rounds, parser, show, spread
from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.nn.cpu import onednn, products
from paddle_vl.nn.linear import split_columns
from paddle_vl.nn.norm import layer_norm
from paddle_vl.nn.operations import dropout, geglu, gelu, swiglu, use_kernels

SIDES = ("Paddle", "oneDNN")
COLUMNS = ("operation", "shape", "Paddle ms", "oneDNN ms", "ratio")


def cases(rows: int, columns: int) -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    """Calls by name, with their tensors; those that autograd differentiates get gradients."""
    x, up, both = (paddle.randn([rows, n]) for n in (columns, columns, 2 * columns))
    widths, one_row = [columns, columns // 2, columns // 2], paddle.ones([16, 1, 512])
    weight, bias = paddle.ones([columns]), paddle.zeros([columns])
    scores, mask = paddle.randn([16, 256, 512]), paddle.ones([256, 512])
    return {
        "GELU, tanh": (lambda x: gelu(x, True), [x]),
        "GELU": (gelu, [x]),
        "swiglu": (swiglu, [x, up]),
        "geglu of halves": (geglu, [both]),
        "layer norm": (
            lambda x, weight, bias: layer_norm(x, weight, bias, 1e-6),
            [x, weight, bias],
        ),
        "split in three": (
            lambda x: split_columns(x, widths),
            [both],
        ),
        "dropout": (lambda x: dropout(x, 0.1), [x]),
        "mask of scores": (lambda x: products.times_matrix_(x, mask), [scores]),
        "bias of keys": (lambda x: products.times_row_(x, one_row), [scores]),
    }


def milliseconds(call: Callable[..., Any], tensors: list[Tensor], side: str) -> float:
    """Of forward and, except for operations in place, backward."""
    in_place = tensors[0].ndim == 3
    given = [x.detach() for x in tensors]
    for x in given:
        x.stop_gradient = in_place
    available = onednn.is_available
    if side == "Paddle":
        onednn.is_available = lambda: False
    try:
        begin = time.perf_counter()
        out = call(*given)
        if not in_place:
            outputs = list(out) if isinstance(out, tuple | list) else [out]
            paddle.autograd.backward(outputs, outputs)
        return 1e3 * (time.perf_counter() - begin)
    finally:
        onednn.is_available = available


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rows", type=int, default=1024, help="(default: 1024)")
    made.add_argument("--columns", type=int, default=1024, help="(default: 1024)")
    made.add_argument("--rounds", type=int, default=21, help="(default: 21)")
    made.add_argument("--threads", type=int, default=2, help="(default: 2)")
    options = made.parse_args()
    configure_cpu_runtime(options.threads)
    if not onednn.is_available():
        made.error("Paddle's wheel has no oneDNN: install Paddle's CPU wheel for Linux on x86")
    with use_kernels("cpu"):
        found = measure(options)
    rows = [
        [one["operation"], str(one["shape"]), *(spread(one["ms"][side], 2) for side in SIDES),
         spread(one["ratios"], 1)]
        for one in found
    ]  # fmt: skip
    note = (
        f"Forward and backward, float32, {options.threads} threads; medians and quartiles of "
        f"{options.rounds} rounds. The last two are in place, of attention's exponentials."
    )
    show(options, [Table("onednn", COLUMNS, rows, note)], found)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of both sides of every case, and the ratio of each round."""
    found = []
    for name, (call, tensors) in cases(options.rows, options.columns).items():

        def run(side: str, call: Any = call, tensors: Any = tensors) -> float:
            return milliseconds(call, tensors, side)

        for side in SIDES:
            run(side)
        rounds = in_rounds(SIDES, options.rounds, run)
        found.append(
            {
                "operation": name,
                "shape": list(tensors[0].shape),
                "ms": {side: [one[side] for one in rounds] for side in SIDES},
                "ratios": [one["Paddle"] / one["oneDNN"] for one in rounds],
            }
        )
    return found


if __name__ == "__main__":
    main()
