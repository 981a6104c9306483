"""Memory and time of the head with its loss: logits of all rows, against chunks of target rows.

    python tools/benchmarks/head_loss.py

Forward and backward of a head of `--width` and `--vocab` in float32, in turn in one process. Peaks
are what Paddle's allocator had at most, above what it had before; the rows, the weight and its
gradient are in neither. The last rows are by formula, for bfloat16 on a GPU: 12 bytes per logit
where all exist (bfloat16 and float32, each with its gradient), 10 where nothing keeps them.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
import paddle
from paddle.base.core import (
    host_memory_stat_current_value,
    host_memory_stat_peak_value,
    host_memory_stat_reset_peak_value,
)

from harness import Table, in_rounds, parser, quartiles, show
from paddle_vl.nn import operations
from paddle_vl.nn.linear import VocabHead
from paddle_vl.nn.objective import target_rows
from paddle_vl.nn.operations import IGNORE_INDEX, TargetRows
from paddle_vl.nn.placement import SingleDevicePlacement

# Rows, and the share of them that has a target.
CASES = ((512, 1.0), (1024, 1.0), (2048, 1.0), (4096, 1.0), (4096, 0.25))
# Rows and vocabulary of the formula: micro-batches of Qwen3-VL.
PUBLISHED = ((8192, 151936), (32768, 151936))
BEFORE, AFTER = 12, 10


class Case:
    """A head, its input, and the targets of some rows."""

    def __init__(self, options: argparse.Namespace, num_rows: int, share: float):
        rng = np.random.default_rng(0)
        self.ops, self.head = SingleDevicePlacement().ops, VocabHead(options.width, options.vocab)
        self.x_TD = paddle.to_tensor(rng.normal(size=(num_rows, options.width)).astype("float32"))
        self.x_TD.stop_gradient = False
        targets_T = rng.integers(0, options.vocab, num_rows)
        targets_T[rng.permutation(num_rows)[int(share * num_rows) :]] = IGNORE_INDEX
        self.targets_T = paddle.to_tensor(targets_T)
        rows_2N = paddle.to_tensor(target_rows(targets_T))
        self.targets = TargetRows(rows_2N[0], rows_2N[1])

    def all_logits(self) -> None:
        # A model returns them with the loss, so they exist in the backward pass.
        logits_TV = self.head(self.x_TD)
        self.ops.token_loss(logits_TV, self.targets_T)[0].backward()

    def chunks(self) -> None:
        self.ops.head_loss(self.head, self.x_TD, self.targets).backward()

    def measured(self, run: Callable[[], None]) -> tuple[float, float]:
        """CPU seconds, and peak MB."""
        kept = (self.x_TD.size + self.head.weight.size) * 4
        host_memory_stat_reset_peak_value("Allocated", 0)
        before, start = host_memory_stat_current_value("Allocated", 0), time.process_time()
        run()
        seconds = time.process_time() - start
        peak = host_memory_stat_peak_value("Allocated", 0) - before - kept
        for tensor in (self.x_TD, self.head.weight):
            tensor.clear_gradient(False)
        return seconds, peak / 1e6


def measure(options: argparse.Namespace) -> list[dict]:
    found = []
    for num_rows, share in CASES:
        case = Case(options, num_rows, share)
        sides = {"all": case.all_logits, "chunks": case.chunks}
        rounds = in_rounds(
            list(sides), options.rounds + 1, lambda side, c=case, s=sides: c.measured(s[side])
        )[1:]
        found.append(
            {
                "rows": num_rows,
                "targets": int(share * num_rows),
                "peak": {side: min(one[side][1] for one in rounds) for side in sides},
                "ratio": quartiles([one["chunks"][0] / one["all"][0] for one in rounds])[1],
            }
        )
    return found


def tables(found: list[dict], options: argparse.Namespace) -> Iterator[Table]:
    rows = [
        [
            f"{one['rows']:,}", f"{one['targets']:,}", f"{options.vocab:,}",
            *(f"{one['peak'][side]:,.0f}" for side in ("all", "chunks")), f"{one['ratio']:.2f}",
        ]
        for one in found
    ]  # fmt: skip
    rows += [
        [
            f"{num_rows:,}", f"{num_rows:,}", f"{vocab:,}",
            *(f"{size / 1e6:,.0f}" for size in by_formula(num_rows * vocab)), "",
        ]
        for num_rows, vocab in PUBLISHED
    ]  # fmt: skip
    columns = ["rows", "with target", "vocabulary", "all logits, MB", "chunks, MB", "time"]
    note = (
        f"Width {options.width}, float32, chunks of at most {options.logits:,} logits; time is the "
        "median ratio of chunks to all logits. The last two rows are a formula for bfloat16 and "
        f"chunks of {operations.CHUNK_LOGITS:,} logits: {BEFORE} and {AFTER} bytes per logit."
    )
    yield Table("head_loss", columns, rows, note)


def by_formula(num_logits: int) -> tuple[int, int]:
    """Bytes in bfloat16 with all logits, and in chunks."""
    return BEFORE * num_logits, AFTER * min(num_logits, operations.CHUNK_LOGITS)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--width", type=int, default=256, help="(default: 256)")
    made.add_argument("--vocab", type=int, default=16384, help="(default: 16384)")
    made.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    made.add_argument("--logits", type=int, default=1 << 23, help="of a chunk (default: 2^23)")
    options = made.parse_args()
    default, operations.CHUNK_LOGITS = operations.CHUNK_LOGITS, options.logits
    found = measure(options)
    operations.CHUNK_LOGITS = default
    show(options, list(tables(found, options)), found)


if __name__ == "__main__":
    main()
