"""Count what the visual rows of a micro-batch cost in PaddleFleet, as published and with `install`.

    python tools/count_paddlefleet.py            write the tables into docs/paddlefleet.md
    python tools/count_paddlefleet.py --check    exit with 1 if the page is not up to date

Runs the stand-ins of tests/support/paddlefleet_standin, forward and backward, as one rank; the
other ranks of a group are not there, and its collectives are counted instead of run. Counted are,
beyond a batch of text: reads of values on the host; searches (`nonzero`, `masked_select`) and the
entries that they look at; kernels, without those that only make a view; and rows whose gradient is
all-reduced. All are the same on every machine.
"""

import argparse
import importlib
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.distributed import ParallelEnv
from paddle.profiler import Profiler

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from paddle_vl.testing import record_host_reads  # noqa: E402
from tests.support import paddlefleet_cases as cases  # noqa: E402
from tests.support.paddlefleet_standin import VERSIONS, stand_in  # noqa: E402

PAGE = ROOT / "docs" / "paddlefleet.md"
# Visual tokens of a sample in a run, of which it has one for each rank.
SAMPLES, LENGTH, TOKENS, RANKS = 8, 512, 24, 4
WIDTH = cases.WIDTH
NAMES = {"today": "PaddleFleet of 2026-11", "before": "PaddleFleet 0.3, PaddleFormers 1.2.0"}
# Micro-batches: kinds, sequence parallelism, MTP depths.
ROWS: dict[str, tuple[tuple[str, ...], bool, int]] = {
    "images, plain or TP": (("image",), False, 0),
    "images, one of 4 SP ranks": (("image",), True, 0),
    "images and videos, plain or TP": (("image", "video"), False, 0),
    "images and videos, one of 4 SP ranks": (("image", "video"), True, 0),
    "images without levels, plain or TP": (("image",), False, 0),
    "images without levels, one MTP layer": (("image",), False, 1),
}
COLUMNS = ("host reads", "searches", "entries searched", "kernels", "rows all-reduced")
_SEARCHES = ("nonzero", "masked_select")
_VIEWS = ("reshape", "transpose", "flatten", "squeeze", "unsqueeze", "slice", "split", "expand")


def batch(kinds: tuple[str, ...], has_levels: bool) -> dict[str, Any]:
    """Samples with a run of visual tokens in the slice of every rank, of the kinds in turn."""
    ids = np.ones([SAMPLES, RANKS, LENGTH // RANKS], "int64")
    for rank in range(RANKS if kinds else 0):
        ids[:, rank, 8:][:, :TOKENS] = getattr(cases, kinds[rank % len(kinds)].upper())
    ids = ids.reshape(SAMPLES, LENGTH)
    positions = np.broadcast_to(np.arange(LENGTH), (3, *ids.shape)).astype("int64")
    dict_args: dict[str, Any] = {"position_ids": paddle.to_tensor(positions)}
    for kind in kinds:
        rows = int((ids == getattr(cases, kind.upper())).sum())
        tensors = [paddle.ones([rows, WIDTH]) for _ in range(1 + cases.LEVELS)]
        for tensor in tensors:
            tensor.stop_gradient = False
        dict_args[f"{kind}_embeds"] = tensors[0]
        if has_levels:
            dict_args[f"deepstack_{kind}_embeds"] = tensors[1:]
    return dict_args | {"input_ids": paddle.to_tensor(ids)}


def counts(config: Any, indexed: bool, dict_args: dict[str, Any]) -> Counter[str] | None:
    """Of one micro-batch; None where the published embedding fails."""
    found: Counter[str] = Counter()
    model = cases.build(config, indexed)

    def searched(search: Any, x: paddle.Tensor, *arguments: Any) -> paddle.Tensor:
        found.update({"searches": 1, "entries searched": x.size})
        return search(x, *arguments)

    def summed(x: paddle.Tensor, **_: Any) -> None:
        found["rows all-reduced"] += x.shape[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", lambda parts, x, **_: parts.extend([x] * RANKS))
        patch.setattr(dist, "all_reduce", summed)
        for name in _SEARCHES:
            patch.setattr(paddle, name, partial(searched, getattr(paddle, name)))
        with Profiler(on_trace_ready=lambda _: None) as profiler, record_host_reads() as reads:
            try:
                hidden = model(dict(dict_args))
            except (ValueError, TypeError):
                return None
            found["host reads"] = len(reads)
            hidden.sum().backward()
    found["kernels"] = len(list(_kernels(profiler)))
    return found


def _kernels(profiler: Profiler) -> Iterator[str]:
    left = list(profiler.profiler_result.get_data().values())
    while left:
        event = left.pop()
        left += event.children_node
        name = event.name.removesuffix(" kernel launch")
        if name != event.name and not name.removesuffix("_grad").startswith(_VIEWS):
            yield name


def table(version: str) -> str:
    """The rows of a version, published -> with `install`."""
    lines = [f"| {NAMES[version]} | {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * len(COLUMNS)]
    with stand_in(version):
        group = SimpleNamespace(rank=1, nranks=RANKS, world_size=RANKS)
        state = importlib.import_module("paddlefleet.parallel_state")
        base = importlib.import_module("paddlefleet.transformer.transformer_layer")
        for name, (kinds, by_sequence, depth) in ROWS.items():
            has_levels = "without levels" not in name
            if version == "before" and not has_levels:
                continue  # Qwen3.5 merged its images outside of the embedding.
            config = cases.config(
                sequence_parallel=by_sequence,
                num_nextn_predict_layers=depth,
                specific_layer=cases.text_layer() if has_levels else base.TransformerLayer,
            )
            state.set_tensor_model_parallel_group(group if by_sequence else None)
            made, text = batch(kinds, has_levels), batch((), False)
            cells = [[] for _ in COLUMNS]
            for indexed in (False, True):
                of_images, of_text = counts(config, indexed, made), counts(config, indexed, text)
                assert of_text is not None, "text fails in no version"
                for cell, column in zip(cells, COLUMNS, strict=True):
                    fails = of_images is None
                    cell.append("fails" if fails else f"{of_images[column] - of_text[column]:,}")
            cells = " | ".join(" -> ".join(cell) for cell in cells)
            lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    logging.disable(logging.INFO)
    if not paddle.is_compiled_with_cuda():
        # `PipelineLayer` asks for the number of the card.
        ParallelEnv._device_id = 0  # type: ignore[attr-defined]
    tables = "\n\n".join(map(table, VERSIONS))
    text = PAGE.read_text(encoding="utf-8")
    marked = re.compile(
        r"(<!-- counts: tools/count_paddlefleet.py -->\n\n).*?(\n\n<!-- end -->)", re.S
    )
    assert marked.search(text), f"{PAGE} has no place for the tables"
    new = marked.sub(lambda found: found[1] + tables + found[2], text)
    if check and new != text:
        sys.exit(f"{PAGE.name} is not up to date: run tools/{Path(__file__).name}")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
