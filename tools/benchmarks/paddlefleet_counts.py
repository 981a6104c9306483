"""Host reads, searches and kernels of images in PaddleFleet's layers, as published and indexed.

    python tools/benchmarks/paddlefleet_counts.py

Runs a forward and backward pass of the stand-ins of tests/support/paddlefleet_standin, whose
embedding and text layers issue the published ones' operations around a small row-wise decoder, and
subtracts what a text batch of the same shape takes. Under sequence parallelism it is one rank of a
mock group of 4. Views of memory are not kernels. Exits with 1 if the indexed layers read a value on
the host.

A search (`nonzero`) lets the host wait as a read does, since its result has a length: both are
counted, apart.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from paddle import distributed, profiler

from harness import ROOT, Table, parser, show
from paddle_vl.parallel.gloo_fleet import install
from step_counts import record_host_reads

MP, LEVELS = 4, 3
VIEWS = (
    *("reshape", "transpose", "slice", "strided_slice", "split", "unsqueeze", "squeeze"),
    *("flatten", "expand_as", "share_data"),
)
BATCHES = {
    "8 samples with images": ["a##a#aa#"] * 8,
    "8 samples, images and videos": ["a#%a##%a"] * 8,
}
NAMES = ("host reads", "searches", "kernels")


def launches(result: Any) -> list[str]:
    """Names of the kernels in a profile."""
    found = []

    def walk(node: Any) -> None:
        if node.type == profiler.TracerEventType.DygraphKernelLaunch:
            found.append(node.name.removesuffix(" kernel launch"))
        for child in node.children_node:
            walk(child)

    for root in result.get_data().values():
        walk(root)
    return found


def count(step: Callable[[], object]) -> dict[str, int]:
    step()
    profile = profiler.Profiler(
        targets=[profiler.ProfilerTarget.CPU], on_trace_ready=lambda _: None
    )
    with record_host_reads() as reads:
        profile.start()
        step()
        profile.stop()
    names = launches(profile.profiler_result)
    kernels = [name for name in names if name.removesuffix("_grad") not in VIEWS]
    return dict(zip(NAMES, (len(reads), names.count("nonzero"), len(kernels)), strict=True))


@contextmanager
def mock_collectives() -> Iterator[None]:
    """Collectives that return at once, with tensors of the right shapes."""
    kept = distributed.all_gather, distributed.all_reduce
    distributed.all_gather = lambda parts, x, group: parts.extend([x] * group.nranks)
    distributed.all_reduce = lambda x, group: None
    try:
        yield
    finally:
        distributed.all_gather, distributed.all_reduce = kept


def counted(cases: Any, name: str, sequence_parallel: bool) -> dict[str, dict[str, int] | None]:
    """Counts of a batch, by way, beyond those of a text batch; None where it fails."""
    state = importlib.import_module("paddlefleet.parallel_state")
    size = MP if sequence_parallel else 1
    group = SimpleNamespace(rank=1, nranks=size, world_size=size) if sequence_parallel else None
    state.set_tensor_model_parallel_group(group)
    cases.BATCHES["text of its shape"] = ["a" * len(row) for row in BATCHES[name]]
    found: dict[str, dict[str, int] | None] = {}
    for way in ("published", "indexed"):
        model = cases.build(cases.config(sequence_parallel=sequence_parallel), way == "indexed")

        def step(batch: str, model: Any = model) -> None:
            model(dict(cases.batch(batch).dict_args)).sum().backward()

        text = count(lambda step=step: step("text of its shape"))
        try:
            images = count(lambda step=step: step(name))
        except ValueError:
            found[way] = None
            continue
        found[way] = {key: images[key] - text[key] for key in NAMES}
    return found


def main() -> int:
    options = parser(__doc__).parse_args()
    sys.path.insert(0, str(ROOT))
    cases = importlib.import_module("tests.support.paddlefleet_cases")
    stand_in = importlib.import_module("tests.support.paddlefleet_standin").stand_in
    install()
    cases.BATCHES.update(BATCHES)
    found = {}
    with stand_in(), mock_collectives():
        for name in BATCHES:
            found[name] = counted(cases, name, sequence_parallel=False)
            found[f"{name}, one of {MP} SP ranks"] = counted(cases, name, sequence_parallel=True)
    rows = [
        [
            label,
            *(f"{cell(ways['published'], key)} -> {cell(ways['indexed'], key)}" for key in NAMES),
        ]
        for label, ways in found.items()
    ]
    note = (
        f"Published -> indexed, beyond a text batch; forward and backward, {LEVELS} deepstack "
        "levels. The published embedding fails on images and videos together."
    )
    show(options, [Table("paddlefleet_counts", ["batch", *NAMES], rows, note)], found)
    return int(
        any(ways["indexed"] is None or ways["indexed"]["host reads"] for ways in found.values())
    )


def cell(counts: dict[str, int] | None, key: str) -> str:
    return "fails" if counts is None else str(counts[key])


if __name__ == "__main__":
    raise SystemExit(main())
