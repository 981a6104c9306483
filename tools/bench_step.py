"""Time one training step (forward, backward, optimizer) of a mid-size Qwen3-VL on this machine.

    python tools/bench_step.py
    python tools/bench_step.py --default-runtime     # without the CPU settings that commands make

Float32, two threads, batch already on the device, two warm-up and ten timed steps, medians. Beside
the times it prints the speed of a plain matrix product, measured in the same run: the ratio of a
step to its matrix products alone holds when the machine is slower for a while.
"""

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path

THREADS = "2"
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, THREADS)

import numpy as np  # noqa: E402
import paddle  # noqa: E402

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration  # noqa: E402
from paddle_vl.batch.positions import mrope_position_ids  # noqa: E402
from paddle_vl.batch.visual_index import host_visual_indices  # noqa: E402
from paddle_vl.compat import configure_cpu_runtime  # noqa: E402

CONFIG = Path(__file__).parents[1] / "configs" / "bench" / "qwen3_vl_step.json"
FIRST_PAD = 11


def build_batch(config: Qwen3VLConfig, batch: dict, seed: int = 0) -> dict:
    """The batch that the configuration describes, as a collator would give it, on the device."""
    rng = np.random.default_rng(seed)
    size, length = batch["size"], batch["sequence_length"]
    pads = batch["visual_tokens_per_image"]
    input_ids = rng.integers(0, 2000, (size, length), dtype=np.int64)
    input_ids[:, FIRST_PAD - 1] = config.vision_start_token_id
    input_ids[:, FIRST_PAD : FIRST_PAD + pads] = config.image_token_id
    input_ids[:, FIRST_PAD + pads] = config.vision_end_token_id
    labels = input_ids.copy()
    labels[:, : FIRST_PAD + pads + 1] = -100
    grids = np.array([batch["image_grid_thw"]] * size, dtype=np.int64)
    patches = int(grids.prod(axis=1).sum())
    pixels = rng.standard_normal((patches, config.vision_config.patch_dim), dtype=np.float32)
    ids = {"image_token_id": config.image_token_id, "video_token_id": config.video_token_id}
    position_ids, _ = mrope_position_ids(input_ids, image_grid_thw=grids, **ids)
    arrays = {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "pixel_values": pixels,
        **host_visual_indices(input_ids, num_image_rows=size * pads, **ids),
    }
    return {name: paddle.to_tensor(array) for name, array in arrays.items()} | {
        "image_grid_thw": grids,
        "num_target_tokens": int((labels[:, 1:] != -100).sum()),
    }


def matmul_gflops() -> float:
    """Speed of a [2048, 768] x [768, 768] product, the size of the model's own."""
    a, b = paddle.randn([2048, 768]), paddle.randn([768, 768])
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        paddle.matmul(a, b)
        times.append(time.perf_counter() - begin)
    return 2 * 2048 * 768 * 768 / statistics.median(times) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="model, batch and optimizer")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default 10)")
    parser.add_argument(
        "--default-runtime", action="store_true", help="leave Paddle's CPU settings as they are"
    )
    args = parser.parse_args()
    settings = json.loads(args.config.read_text(encoding="utf-8"))
    if not args.default_runtime:
        configure_cpu_runtime()
    paddle.seed(0)
    config = Qwen3VLConfig.from_dict(settings["model"])
    model = Qwen3VLForConditionalGeneration.from_config(config)
    optimizer = paddle.optimizer.AdamW(
        learning_rate=settings["optimizer"]["lr"], parameters=model.parameters()
    )
    batch = build_batch(config, settings["batch"])
    times, losses = [], []
    for _ in range(2 + args.steps):
        begin = time.perf_counter()
        output = model(**batch)
        forward = time.perf_counter()
        output.loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        end = time.perf_counter()
        times.append((forward - begin, backward - forward, end - backward, end - begin))
        losses.append(output.loss.item())
    timed = times[2:]
    forward, backward, update, step = (
        statistics.median(column) for column in zip(*timed, strict=True)
    )
    tokens = batch["input_ids"].size
    gflops = matmul_gflops()
    print(f"loss          {losses[0]:.5f} -> {losses[-1]:.5f} in {len(losses)} steps")
    print(f"step          {step:.3f} s  (min {min(t[3] for t in timed):.3f})")
    print(f"  forward     {forward:.3f} s")
    print(f"  backward    {backward:.3f} s")
    print(f"  optimizer   {update:.3f} s")
    print(f"tokens/s      {tokens / step:.0f}")
    print(f"matmul        {gflops:.0f} GFLOP/s in this run")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak RSS      {peak:.0f} MiB")


if __name__ == "__main__":
    main()
