"""Time of the visual indices: computed once per step, or in every deepstack layer.

    python tools/benchmarks/visual_indices.py

The reference computes them in each of three layers, as PaddleFleet's deepstack layers do: on a rank
of a tensor-parallel group of 4 it searches the mask and counts, per sample, the visual tokens
before and inside the rank's rows; each count is read on the host. Half of the tokens are visual.
Times are medians. Then the host reads in a decoder forward and backward are counted; exits with 1
unless they are 0.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import paddle

from harness import Table, in_rounds, parser, show
from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.batch.visual_index import RowPart, compute_visual_indices, host_visual_indices
from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.testing import record_host_reads

IMAGE, VIDEO, LEVELS, MP = 500, 501, 3, 4
SHAPES = ((32, 2048), (8, 32768))


def half_visual_ids(batch: int, length: int) -> np.ndarray:
    """Ids with one image over the second and third quarter of every row."""
    ids_BL = np.random.default_rng(0).integers(0, IMAGE, (batch, length), dtype=np.int64)
    ids_BL[:, length // 4 : length // 4 + length // 2] = IMAGE
    return ids_BL


def layer_indices_by_loop(mask_BL: paddle.Tensor, rank: int, size: int):
    """One deepstack layer of the reference: sequence-first rows, one pass per sample."""
    batch, length = mask_BL.shape
    part = length // size
    begin, end = rank * part, (rank + 1) * part
    update = paddle.nonzero(mask_BL[:, begin:end].transpose([1, 0]).reshape([-1]))
    gather, offset = [], 0
    for sample in range(batch):
        row = mask_BL[sample].astype("int64")
        before, inside, total = (int(x.sum().numpy()) for x in (row[:begin], row[begin:end], row))
        gather.append(paddle.arange(offset + before, offset + before + inside))
        offset += total
    return update, paddle.concat(gather)


def median_ms(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def time_shape(batch: int, length: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of the three ways."""
    ids_BL = half_visual_ids(batch, length)
    ids = paddle.to_tensor(ids_BL)
    mask, part = ids == IMAGE, RowPart(1, MP)
    num_rows = int((ids_BL == IMAGE).sum())

    def reference():
        for _ in range(LEVELS):
            layer_indices_by_loop(mask, part.rank, part.size)

    def traced():
        search = lambda rows: paddle.nonzero(rows).reshape([-1])  # noqa: E731
        compute_visual_indices(ids == IMAGE, None, nonzero=search, part=part)

    def host():
        host_visual_indices(
            ids_BL, image_token_id=IMAGE, video_token_id=VIDEO, num_image_rows=num_rows, part=part
        )

    ways = {f"in {LEVELS} layers": reference, "once, Paddle": traced, "once, NumPy": host}
    rounds = in_rounds(list(ways), 3, lambda name: median_ms(ways[name], repeats))
    return {name: statistics.median(found[name] for found in rounds) for name in ways}


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
    found = {str(list(shape)): time_shape(*shape, options.repeats) for shape in SHAPES}
    reads = count_host_reads()
    rows = [
        [f"{shape} {way}", f"{times[way]:.3f}", f"{next(iter(times.values())) / times[way]:.1f}"]
        for shape, times in found.items()
        for way in times
    ]
    note = (
        f"Batch and length of token rows, half of them visual; tensor-parallel degree {MP}. Host "
        f"reads in the decoder, forward and backward: {reads}."
    )
    columns = ["visual indices", "ms", "times faster"]
    show(options, [Table("visual_indices", columns, rows, note)], found | {"host_reads": reads})
    return int(reads > 0)


if __name__ == "__main__":
    raise SystemExit(main())
