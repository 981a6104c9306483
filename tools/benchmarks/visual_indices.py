"""Time of the visual indices: computed once per step, or in every deepstack layer.

    python tools/benchmarks/visual_indices.py

The reference computes them in each of three layers, as PaddleFleet's deepstack layers do: on a rank
of a tensor-parallel group of 4 it searches the mask and counts, per sample, the visual tokens
before and inside the rank's rows; each count is read on the host. Half of the tokens are visual.
All three layouts of `compute_visual_indices` are compared with it, in time, host reads and kernels;
the indices must be equal. Times are medians. Then the host reads in a decoder forward and backward
are counted; exits with 1 unless they are 0.
"""

import statistics
import time
from collections.abc import Callable
from typing import get_args

import numpy as np
import paddle
from paddle.base.core import TracerEventType
from paddle.profiler import Profiler, ProfilerTarget

from harness import Table, in_rounds, parser, show
from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.batch.visual_index import (
    Layout,
    RowPart,
    compute_visual_indices,
    host_visual_indices,
)
from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.testing import record_host_reads

IMAGE, VIDEO, LEVELS, MP = 500, 501, 3, 4
SHAPES = ((32, 2048), (8, 32768))


def half_visual_ids(batch: int, length: int) -> np.ndarray:
    """Ids with one image over the second and third quarter of every row."""
    ids_BL = np.random.default_rng(0).integers(0, IMAGE, (batch, length), dtype=np.int64)
    ids_BL[:, length // 4 : length // 4 + length // 2] = IMAGE
    return ids_BL


def layer_indices_by_loop(mask_BL: paddle.Tensor, part: RowPart, layout: Layout):
    """One deepstack layer of the reference: one pass per sample with three host reads.

    PaddleFleet has `batch_slices` rows. For the other layouts the same loop finds what stands
    before and inside the rank's rows, one sample (`token_rows`) or position (`sequence_first`)
    after another.
    """
    batch, length = mask_BL.shape
    if layout == "batch_slices":
        begin, end = part.bounds(length)
        rows = mask_BL[:, begin:end].reshape([-1])
        cuts = [(begin, end)] * batch
    else:
        begin, end = part.bounds(batch * length)
        if layout == "sequence_first":
            return _sequence_first_by_loop(mask_BL, begin, end)
        rows = mask_BL.reshape([-1])[begin:end]
        starts = [
            min(max(edge - b * length, 0), length) for b in range(batch) for edge in (begin, end)
        ]
        cuts = list(zip(starts[::2], starts[1::2], strict=True))
    update, gather, offset = paddle.nonzero(rows), [], 0
    for sample, (first, last) in enumerate(cuts):
        row = mask_BL[sample].astype("int64")
        before, inside, total = (int(x.sum().numpy()) for x in (row[:first], row[first:last], row))
        gather.append(paddle.arange(offset + before, offset + before + inside))
        offset += total
    return update, paddle.concat(gather)


def _sequence_first_by_loop(mask_BL: paddle.Tensor, begin: int, end: int):
    batch, _ = mask_BL.shape
    rows, numbers, offset = mask_BL.transpose([1, 0]).reshape([-1])[begin:end], [], 0
    for sample in range(batch):
        row = mask_BL[sample].astype("int64")
        numbers.append(row.cumsum(0) - 1 + offset)
        offset += int(row.sum().numpy())
    order = paddle.stack(numbers, axis=1).reshape([-1])[begin:end]
    update = paddle.nonzero(rows).reshape([-1])
    return update, paddle.gather(order, update)


def median_ms(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def count_kernels(function: Callable[[], object]) -> int:
    """Kernels that a call launches."""
    profiler = Profiler(targets=[ProfilerTarget.CPU], on_trace_ready=lambda _: None)
    with profiler:
        function()
    nodes = list(profiler.profiler_result.get_data().values())
    kernels = 0
    # Nodes are a tree per thread.
    while nodes:
        node = nodes.pop()
        kernels += node.type == TracerEventType.DygraphKernelLaunch
        nodes += node.children_node
    return kernels


def measure(batch: int, length: int, layout: Layout, repeats: int) -> dict[str, dict[str, float]]:
    """Median milliseconds, host reads and kernels of a step, by way."""
    ids_BL = half_visual_ids(batch, length)
    ids = paddle.to_tensor(ids_BL)
    mask, part = ids == IMAGE, RowPart(1, MP)
    num_rows = int((ids_BL == IMAGE).sum())

    def reference():
        for _ in range(LEVELS):
            found = layer_indices_by_loop(mask, part, layout)
        return found

    def traced():
        search = lambda rows: paddle.nonzero(rows).reshape([-1])  # noqa: E731
        return compute_visual_indices(ids == IMAGE, None, nonzero=search, part=part, layout=layout)

    def host():
        return host_visual_indices(
            ids_BL, image_token_id=IMAGE, video_token_id=VIDEO, num_image_rows=num_rows, part=part,
            layout=layout,
        ).values()  # fmt: skip

    ways = {f"in {LEVELS} layers": reference, "once, Paddle": traced, "once, NumPy": host}
    expected = [index.numpy().reshape(-1).tolist() for index in reference()]
    for way in (traced, host):
        if [np.asarray(index).tolist() for index in list(way())[:2]] != expected:
            raise SystemExit(f"{layout}: the ways give different indices")
    rounds = in_rounds(list(ways), 3, lambda name: median_ms(ways[name], repeats))
    found = {}
    for name, way in ways.items():
        with record_host_reads() as reads:
            way()
        found[name] = {
            "ms": statistics.median(times[name] for times in rounds),
            "host_reads": len(reads),
            "kernels": count_kernels(way),
        }
    return found


def count_host_reads() -> int:
    """Host reads in a decoder forward and backward over a batch with three deepstack levels."""
    config = Qwen3VLConfig.from_dict(
        {
            "text_config": {
                "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 16, "rope_scaling": {"mrope_section": [4, 2, 2]},
            },
            "vision_config": {
                "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
                "out_hidden_size": 64, "num_position_embeddings": 36,
                "deepstack_visual_indexes": [0, 1, 2],
            },
            "image_token_id": IMAGE, "video_token_id": VIDEO,
            "vision_start_token_id": 502, "vision_end_token_id": 503,
        }
    )  # fmt: skip
    model = Qwen3VLForConditionalGeneration.from_config(config)
    ids_BL = half_visual_ids(2, 32)
    grid = np.array([[1, 8, 8]] * 2, dtype=np.int64)
    pixels = paddle.randn([128, config.vision_config.patch_dim])
    position_ids, _ = model.position_ids(ids_BL, image_grid_thw=grid)
    arrays = host_visual_indices(
        ids_BL, image_token_id=IMAGE, video_token_id=VIDEO, num_image_rows=32
    )
    batch = {"input_ids": ids_BL, "position_ids": position_ids, **arrays}
    dict_args = {name: paddle.to_tensor(array) for name, array in batch.items()}
    dict_args |= model.encode_visual(pixels, grid)
    with record_host_reads() as reads:
        model.lm_head(model.language_model(dict_args)).sum().backward()
    return len(reads)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=15, help="timed calls each (default 15)")
    options = made.parse_args()
    configure_cpu_runtime()
    found = {
        f"{list(shape)} {layout}": measure(*shape, layout, options.repeats)
        for shape in SHAPES
        for layout in get_args(Layout)
    }
    reads = count_host_reads()
    rows = []
    for case, ways in found.items():
        reference = next(iter(ways.values()))["ms"]
        for way, of in ways.items():
            times = f"{reference / of['ms']:.1f}"
            rows.append(
                [
                    f"{case}, {way}",
                    f"{of['ms']:.3f}",
                    times,
                    str(of["host_reads"]),
                    str(of["kernels"]),
                ]
            )
    note = (
        f"Batch and length of token rows, half of them visual; tensor-parallel degree {MP}. All "
        "ways give the same indices. Host reads in the decoder, forward and backward, over a batch "
        f"with {LEVELS} deepstack levels: {reads}."
    )
    columns = ["visual indices of a step", "ms", "times faster", "host reads", "kernels"]
    show(options, [Table("visual_indices", columns, rows, note)], found | {"host_reads": reads})
    return int(reads > 0)


if __name__ == "__main__":
    raise SystemExit(main())
