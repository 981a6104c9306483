"""The step of `step.py --family qwen3_vl` in HF transformers on torch (sdpa).

    PYTHON tools/benchmarks/step_hf.py CONFIG STEPS THREADS     prints one line of JSON

`step.py --against PYTHON` runs it with an interpreter that has torch, transformers and PyYAML; it
imports nothing of paddle_vl. `export_hf.py` takes its model and its samples from here.
"""

import argparse
import json
import resource
import statistics
import time
from typing import Any

import numpy as np

FIRST_PAD, WARM_UP = 11, 2
IDS = {"image_token_id": 2040, "vision_start_token_id": 2041, "vision_end_token_id": 2042,
       "video_token_id": 2043}  # fmt: skip


def options_of(doc: str | None, *numbers: str) -> argparse.ArgumentParser:
    """A parser of a configuration file and whole numbers."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("config", metavar="CONFIG", help="configs/bench/qwen3_vl_step.yaml")
    for name in numbers:
        parser.add_argument(name, metavar=name.upper(), type=int)
    return parser


def model_of(config_file: str, threads: int) -> tuple[Any, dict[str, Any]]:
    """HF's model of a run file with random weights, and the file's settings."""
    # Imported here, so that --help needs neither.
    import torch  # pyright: ignore[reportMissingImports]
    import yaml
    from transformers import (  # pyright: ignore[reportMissingImports]
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with open(config_file, encoding="utf-8") as file:
        settings = yaml.safe_load(file)
    config = Qwen3VLConfig(**settings["model"]["config"], **IDS)
    model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    return model.float(), settings


def samples(config: Any, settings: dict[str, Any], size: int, most: int) -> dict[str, Any]:
    """Samples of one image each, with random text of ids below `most`."""
    import torch  # pyright: ignore[reportMissingImports]

    vision, data = config.vision_config, settings["data"]
    side = int(data["max_pixels"] ** 0.5) // vision.patch_size
    pads = (side // vision.spatial_merge_size) ** 2
    ids = np.random.default_rng(0).integers(0, most, (size, data["max_length"]))
    ids[:, FIRST_PAD - 1] = config.vision_start_token_id
    ids[:, FIRST_PAD : FIRST_PAD + pads] = config.image_token_id
    ids[:, FIRST_PAD + pads] = config.vision_end_token_id
    patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    input_ids = torch.tensor(ids)
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == config.image_token_id).int(),
        "pixel_values": torch.randn(size * side**2, patch_dim),
        "image_grid_thw": torch.tensor([[1, side, side]] * size),
    }


def print_result(seconds: dict[Any, Any]) -> None:
    """One line of JSON: the seconds, peak memory and versions."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"seconds": seconds, "peak_rss_mib": peak, "versions": versions}))


def main() -> None:
    options = options_of(__doc__, "steps", "threads").parse_args()
    model, settings = model_of(options.config, options.threads)
    import torch  # pyright: ignore[reportMissingImports]

    train = settings["train"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train["learning_rate"], weight_decay=train["weight_decay"]
    )
    batch = samples(model.config, settings, train["per_device_train_batch_size"], 2000)
    labels = batch["input_ids"].clone()
    # The prompt ends with its image.
    ends = (labels == model.config.vision_end_token_id).nonzero()[:, 1].tolist()
    for row, end in zip(labels, ends, strict=True):
        row[: end + 1] = -100
    times = []
    for _ in range(WARM_UP + options.steps):
        begin = time.perf_counter()
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    print_result({"step": statistics.median(times[WARM_UP:])})


if __name__ == "__main__":
    main()
