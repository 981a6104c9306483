"""Time one training step (forward, backward, optimizer) of a mid-size Qwen3-VL on this machine.

    python tools/bench_step.py
    OMP_NUM_THREADS=2 python tools/bench_step.py --default-runtime    # Paddle's CPU settings as are
    python tools/bench_step.py --against PYTHON    # HF transformers on torch, in turn with this

Float32, two threads, batch already on the device, two warm-up and ten timed steps, medians. Beside
the times it prints the speed of a plain matrix product, measured in the same run, to tell a slow
moment of the machine from slow code.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import paddle

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.batch.positions import mrope_position_ids
from paddle_vl.batch.visual_index import host_visual_indices
from paddle_vl.compat import configure_cpu_runtime

THREADS = 2
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


def measure(settings: dict, steps: int) -> dict[str, float]:
    """Medians in seconds, losses, and peak memory of this process in MiB."""
    paddle.seed(0)
    config = Qwen3VLConfig.from_dict(settings["model"])
    model = Qwen3VLForConditionalGeneration.from_config(config)
    optimizer = paddle.optimizer.AdamW(
        learning_rate=settings["optimizer"]["lr"], parameters=model.parameters()
    )
    batch = build_batch(config, settings["batch"])
    times, losses = [], []
    for _ in range(2 + steps):
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
    names = ("forward", "backward", "optimizer", "step")
    columns = zip(*times[2:], strict=True)
    return {
        name: statistics.median(column) for name, column in zip(names, columns, strict=True)
    } | {
        "tokens": batch["input_ids"].size,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "gflops": matmul_gflops(),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def compare(python: str, config: Path, steps: int, pairs: int = 3) -> None:
    """Alternate with the reference, a fresh process each, and print the ratio of every pair."""
    mine = [sys.executable, __file__, "--config", str(config), "--steps", str(steps), "--json"]
    reference = Path(__file__).with_name("bench_step_hf.py")
    theirs = [python, str(reference), str(config), str(steps), str(THREADS)]
    ratios = []
    for _ in range(pairs):
        found = [
            json.loads(
                subprocess.run(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
                ).stdout.splitlines()[-1]
            )
            for command in (mine, theirs)
        ]
        ratios.append(found[0]["step"] / found[1]["step"])
        print(
            f"step {found[0]['step']:.3f} s here, {found[1]['step']:.3f} s reference, "
            f"ratio {ratios[-1]:.2f}; peak RSS {found[0]['peak_rss_mib']:.0f} and "
            f"{found[1]['peak_rss_mib']:.0f} MiB",
            flush=True,
        )
    print(f"median ratio  {statistics.median(ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="model, batch and optimizer")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default 10)")
    parser.add_argument(
        "--default-runtime", action="store_true", help="leave Paddle's CPU settings as they are"
    )
    parser.add_argument(
        "--against", metavar="PYTHON", help="an interpreter with torch and transformers"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    if args.against:
        compare(args.against, args.config, args.steps)
        return
    if not args.default_runtime:
        configure_cpu_runtime(THREADS)
    found = measure(json.loads(args.config.read_text(encoding="utf-8")), args.steps)
    if args.json:
        print(json.dumps(found))
        return
    print(f"loss          {found['first_loss']:.5f} -> {found['last_loss']:.5f}")
    print(f"step          {found['step']:.3f} s")
    for part in ("forward", "backward", "optimizer"):
        print(f"  {part:<11} {found[part]:.3f} s")
    print(f"tokens/s      {found['tokens'] / found['step']:.0f}")
    print(f"matmul        {found['gflops']:.0f} GFLOP/s in this run")
    print(f"peak RSS      {found['peak_rss_mib']:.0f} MiB")


if __name__ == "__main__":
    main()
