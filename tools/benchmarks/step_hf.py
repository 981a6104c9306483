"""The step of `step.py --family qwen3_vl` in HF transformers on torch (sdpa).

    PYTHON tools/benchmarks/step_hf.py CONFIG STEPS THREADS     prints one line of JSON

`step.py --against PYTHON` runs it with an interpreter that has torch, transformers and PyYAML; it
imports nothing of paddle_vl.
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


def samples(config: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Samples of one image each, with random text and labels behind the image."""
    import torch  # pyright: ignore[reportMissingImports]

    vision, data = config.vision_config, settings["data"]
    size = settings["train"]["per_device_train_batch_size"]
    side = int(data["max_pixels"] ** 0.5) // vision.patch_size
    pads = (side // vision.spatial_merge_size) ** 2
    ids = np.random.default_rng(0).integers(0, 2000, (size, data["max_length"]))
    ids[:, FIRST_PAD - 1] = config.vision_start_token_id
    ids[:, FIRST_PAD : FIRST_PAD + pads] = config.image_token_id
    ids[:, FIRST_PAD + pads] = config.vision_end_token_id
    patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    input_ids = torch.tensor(ids)
    labels = input_ids.clone()
    # The prompt ends with its image.
    labels[:, : FIRST_PAD + pads + 1] = -100
    return {
        "input_ids": input_ids,
        "labels": labels,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == config.image_token_id).int(),
        "pixel_values": torch.randn(size * side**2, patch_dim),
        "image_grid_thw": torch.tensor([[1, side, side]] * size),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("config", metavar="CONFIG", help="configs/bench/qwen3_vl_step.yaml")
    parser.add_argument("steps", metavar="STEPS", type=int)
    parser.add_argument("threads", metavar="THREADS", type=int)
    options = parser.parse_args()
    # Imported here, so that --help needs neither.
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    import yaml

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with open(options.config, encoding="utf-8") as file:
        settings = yaml.safe_load(file)
    config = transformers.Qwen3VLConfig(**settings["model"]["config"], **IDS)
    made = transformers.Qwen3VLForConditionalGeneration
    model = made._from_config(config, attn_implementation="sdpa").float()
    train = settings["train"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train["learning_rate"], weight_decay=train["weight_decay"]
    )
    batch, times = samples(model.config, settings), []
    for _ in range(WARM_UP + options.steps):
        begin = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    found = {
        "seconds": {"step": statistics.median(times[WARM_UP:])},
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
