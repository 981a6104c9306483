"""Time of a layer's experts on padded batches, with and without routing the padding.

    python tools/benchmarks/experts.py --experts 32

One mixture of experts runs forward and backward on a batch of which a share is padding, with every
row routed and with the real rows only, in turn in one process. The ratio is all rows over real rows
of a round; without padding it shows the noise.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from harness import Table, in_rounds, parser, show, spread
from paddle_vl.families.qwen3_vl.moe import SparseMoE, routed_rows
from paddle_vl.families.qwen3_vl.text_config import Qwen3VLMoeTextConfig
from paddle_vl.nn.placement import SingleDevicePlacement

SIDES = ("all rows", "real rows")
COLUMNS = ("padding", "rows", "routed", "all rows ms", "real rows ms", "ratio")


def make_layer(options: argparse.Namespace) -> SparseMoE:
    """A layer with experts; the other sizes of the configuration do not matter."""
    config = Qwen3VLMoeTextConfig(
        vocab_size=8, hidden_size=options.width, intermediate_size=options.width,
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
        mrope_section=[2, 1, 1], num_experts=options.experts,
        num_experts_per_tok=options.chosen, moe_intermediate_size=options.inner,
    )  # fmt: skip
    paddle.seed(0)
    return SparseMoE(config, SingleDevicePlacement())


def make_mask(options: argparse.Namespace, share: float) -> np.ndarray:
    """`[B, L]`, padded on the right: the first row is full, the others share the padding."""
    length, padded = options.length, round(share * options.batch * options.length)
    mask = np.ones([options.batch, length], dtype=np.int64)
    parts = np.array_split(np.arange(padded), options.batch - 1)
    for row, part in zip(mask[1:], parts, strict=True):
        row[length - len(part) :] = 0
    return mask


def step_ms(layer: SparseMoE, x_TD: Tensor, mask: np.ndarray, side: str) -> float:
    """Milliseconds of forward and backward, and of the row indices that the collator makes."""
    real = np.flatnonzero(mask) if side == "real rows" else None
    start = time.perf_counter()
    y_TD, _ = layer(x_TD, routed_rows(mask.shape, None, real))
    y_TD.sum().backward()
    found = 1e3 * (time.perf_counter() - start)
    layer.clear_gradients()
    return found


def measure(options: argparse.Namespace, layer: SparseMoE, share: float) -> dict[str, Any]:
    """Rows, routed rows and milliseconds of both sides at a share of padding."""
    mask = make_mask(options, share)
    x_TD = paddle.randn([mask.size, options.width])
    x_TD.stop_gradient = False
    for side in SIDES:
        step_ms(layer, x_TD, mask, side)
    assert layer.experts.tokens_per_expert is not None
    routed = int(layer.experts.tokens_per_expert.sum()) // options.chosen
    rounds = in_rounds(SIDES, options.rounds, lambda side: step_ms(layer, x_TD, mask, side))
    times = {side: [found[side] for found in rounds] for side in SIDES}
    ratios = [found["all rows"] / found["real rows"] for found in rounds]
    return {
        "padding": share, "rows": mask.size, "routed": routed, "ms": times,
        "ratios": ratios,
    }  # fmt: skip


def table(found: Sequence[dict[str, Any]], options: argparse.Namespace) -> Table:
    rows = [
        [f"{one['padding']:.0%}", str(one["rows"]), str(one["routed"]),
         *(spread(one["ms"][side]) for side in SIDES), spread(one["ratios"], 2)]
        for one in found
    ]  # fmt: skip
    note = (
        f"{options.experts} experts of {options.inner} features, {options.chosen} per token, width "
        f"{options.width}; medians and quartiles of {options.rounds} rounds."
    )
    return Table("experts padding", COLUMNS, rows, note)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--width", type=int, default=256, help="(default: 256)")
    made.add_argument("--inner", type=int, default=192, help="features of an expert (default: 192)")
    made.add_argument("--experts", type=int, default=16, help="(default: 16)")
    made.add_argument("--chosen", type=int, default=4, help="experts per token (default: 4)")
    made.add_argument("--batch", type=int, default=4, help="at least 2 (default: 4)")
    made.add_argument("--length", type=int, default=512, help="(default: 512)")
    made.add_argument("--rounds", type=int, default=11, help="(default: 11)")
    made.add_argument(
        "--padding", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.7],
        help="shares of padding, below (batch - 1) / batch (default: 0 0.25 0.5 0.7)",
    )  # fmt: skip
    options = made.parse_args()
    highest = 1 - 1 / options.batch
    if options.batch < 2 or not all(0 <= share < highest for share in options.padding):
        made.error(
            f"--padding {options.padding} with --batch {options.batch}: the first row is full, so "
            f"shares must be at least 0 and below {highest:.2f}; use two or more rows"
        )
    layer = make_layer(options)
    found = [measure(options, layer, share) for share in options.padding]
    show(options, [table(found, options)], found)


if __name__ == "__main__":
    main()
