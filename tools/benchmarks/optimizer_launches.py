"""Kernels of an optimizer step, per tensor and over flat buckets, and their time on this machine.

    python tools/benchmarks/optimizer_launches.py

The optimizer has as many tensors as Qwen3-VL 2B, of small sizes, and float32 masters of bfloat16
parameters; gradients are those of one micro-batch. A step is everything from these gradients to
rounded parameters: sums in float32, norm, clipping, masked AdamW. Kernels are what Paddle launches,
counted by its profiler; reshapes that move nothing are left out.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, profiler
from paddle.base.framework import EagerParamBase

from harness import Table, in_rounds, parser, quartiles, show
from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.config.schema import TrainConfig
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.train.freeze import decayed_names
from paddle_vl.train.optimizer import Optimizer

SIDES = ("per tensor", "buckets")


class Side:
    """An optimizer, with gradients for its parameters."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], is_flat: bool, width: int):
        rng = np.random.default_rng(0)
        self.named: list[tuple[str, Tensor]] = []
        for name, shape in shapes.items():
            size = [min(side, width) for side in shape]
            value = paddle.to_tensor(rng.normal(size=size), dtype="bfloat16")
            self.named.append((name, EagerParamBase.from_tensor(value, trainable=True)))
        train = TrainConfig(output_dir="unused", weight_decay=0.1, max_grad_norm=1.0)
        store = MasterWeights([parameter for _, parameter in self.named])
        decayed = decayed_names(dict(self.named), train.weight_decay_exclude)
        self.optimizer = Optimizer(self.named, train, decayed, store)
        self.optimizer.masks_updates = True
        if is_flat:
            self.optimizer.use_buckets()
        self.gradients = [paddle.ones(p.shape, dtype=p.dtype) for _, p in self.named]
        self.is_good = paddle.ones([], dtype="bool")

    def give_gradients(self) -> None:
        for (_, parameter), gradient in zip(self.named, self.gradients, strict=True):
            parameter.grad = gradient

    def step(self) -> None:
        optimizer = self.optimizer
        optimizer.store.end_micro_batch()
        optimizer.store.end_backward()
        optimizer.collect_gradients()
        optimizer.update(1e-3, optimizer.squared_norm().sqrt(), self.is_good)
        optimizer.clear_gradients()

    def timed(self) -> float:
        self.give_gradients()
        start = time.process_time()
        self.step()
        return time.process_time() - start


def launches(do: Callable[[], None]) -> Counter[str]:
    """Kernels that Paddle launches, by name."""
    names: Counter[str] = Counter()

    def count(node: Any) -> None:
        if str(node.type).endswith("DygraphKernelLaunch"):
            names[node.name.removesuffix(" kernel launch")] += 1
        for child in node.children_node:
            count(child)

    target = profiler.ProfilerTarget.CPU
    with profiler.Profiler(targets=[target], on_trace_ready=lambda _: None) as recording:
        do()
    result: Any = recording.profiler_result
    for root in result.get_data().values():
        count(root)
    del names["reshape"]
    return names


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = Qwen3VLConfig.named("qwen3-vl-2b")
    model = Qwen3VLForConditionalGeneration.from_config(config, materialize=False)
    # A fused weight is one tensor under several names.
    first = {id(parameter): name for name, parameter in reversed([*model.hf_named_parameters()])}
    shapes = {first[id(p)]: tuple(p.shape) for p in model.parameters()}
    sides = {name: Side(shapes, name == SIDES[1], options.width) for name in SIDES}
    for side in sides.values():
        side.timed()
    rounds = in_rounds(SIDES, options.rounds, lambda name: sides[name].timed())
    found: dict[str, Any] = {
        "num_tensors": len(shapes),
        "width": options.width,
        "num_buckets": len(sides[SIDES[1]].optimizer.tensors),
        "ratio": quartiles([one[SIDES[1]] / one[SIDES[0]] for one in rounds])[1],
    }
    for name, side in sides.items():
        side.give_gradients()
        found[name] = dict(launches(side.step).most_common())
    return found


def tables(found: dict[str, Any]) -> Iterator[Table]:
    sums = {name: sum(found[name].values()) for name in SIDES}
    rows = [["kernels of a step", *(f"{sums[name]:,}" for name in SIDES)]]
    rows.append(
        ["kernels per tensor", *(f"{sums[name] / found['num_tensors']:.1f}" for name in SIDES)]
    )
    for kernel in sorted(found[SIDES[0]], key=lambda name: -found[SIDES[0]][name]):
        if found[SIDES[0]][kernel] >= found["num_tensors"]:
            rows.append([kernel, *(f"{found[name].get(kernel, 0):,}" for name in SIDES)])
    note = (
        f"{found['num_tensors']} tensors in {found['num_buckets']} buckets; sides of at most "
        f"{found['width']}. On this CPU a step over buckets takes {found['ratio']:.2f} of the time."
    )
    yield Table("optimizer_launches", ["", *SIDES], rows, note)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--width", type=int, default=128, help="longest side (default: 128)")
    made.add_argument("--rounds", type=int, default=9, help="(default: 9)")
    options = made.parse_args()
    found = measure(options)
    show(options, list(tables(found)), found)


if __name__ == "__main__":
    main()
