"""Cost of the visual indices: once per step against recomputation in every deepstack layer.

    python tools/bench_visual_indices.py

The reference recomputes, in each of three layers, what a rank of a model-parallel group of 4 adds:
a search of the mask, and per sample a count of the visual tokens before the rank's rows and inside
them, each read on the host. That is how PaddleFleet's deepstack layers do it. Half of the tokens
are visual. Printed as medians, and as the ratio to the reference in the same run; then the host
reads in a decoder forward and backward, which must be 0.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import paddle

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.batch.visual_index import RowPart, compute_visual_indices, host_visual_indices
from paddle_vl.compat import configure_cpu_runtime

IMAGE, VIDEO, LEVELS, MP = 500, 501, 3, 4
SHAPES = ((32, 2048), (8, 32768))
HOST_READS = ("numpy", "item", "tolist", "__bool__", "__int__", "__float__", "__index__")


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
        before, inside, total = (x.sum().item() for x in (row[:begin], row[begin:end], row))
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


def time_shape(batch: int, length: int, repeats: int) -> None:
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

    # In turn, so that a slower moment of the machine falls on all three.
    found: dict[str, list[float]] = {"reference": [], "traced": [], "host": []}
    for _ in range(3):
        for name, function in (("reference", reference), ("traced", traced), ("host", host)):
            found[name].append(median_ms(function, repeats))
    loop, paddle_once, numpy_once = (statistics.median(times) for times in found.values())
    print(f"[{batch}, {length}], half visual, mp {MP}")
    print(f"  per layer, {LEVELS} layers   {loop:8.3f} ms")
    print(f"  once, Paddle          {paddle_once:8.3f} ms   {loop / paddle_once:6.1f} times less")
    print(f"  once, NumPy           {numpy_once:8.3f} ms   {loop / numpy_once:6.1f} times less")


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
    reads = []
    kept = {name: getattr(paddle.Tensor, name) for name in HOST_READS}
    try:
        for name, method in kept.items():
            setattr(paddle.Tensor, name, _counting(name, method, reads))
        model.lm_head(model.language_model(dict_args)).sum().backward()
    finally:
        for name, method in kept.items():
            setattr(paddle.Tensor, name, method)
    return len(reads)


def _counting(name: str, method: Callable, reads: list[str]) -> Callable:
    def counted(self, *args, **kwargs):
        reads.append(name)
        return method(self, *args, **kwargs)

    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="timed calls each (default 15)")
    args = parser.parse_args()
    configure_cpu_runtime()
    for batch, length in SHAPES:
        time_shape(batch, length, args.repeats)
    reads = count_host_reads()
    print(f"host reads in the decoder, forward and backward: {reads}")
    if reads:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
