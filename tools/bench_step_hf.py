"""The step of `bench_step.py` in HF transformers on torch (sdpa), for an interpreter that has both.

    PYTHON tools/bench_step_hf.py CONFIG STEPS THREADS     prints one line of JSON

`bench_step.py --against PYTHON` runs it; nothing of this package is imported here.
"""

import argparse
import json
import resource
import statistics
import time

import numpy as np

FIRST_PAD = 11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", metavar="CONFIG", help="JSON file with model and batch")
    parser.add_argument("steps", metavar="STEPS", type=int)
    parser.add_argument("threads", metavar="THREADS", type=int)
    options = parser.parse_args()
    config_file, steps, threads = options.config, options.steps, options.threads
    # Here, so that --help needs neither.
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with open(config_file, encoding="utf-8") as file:
        settings = json.load(file)
    config, shape = Qwen3VLConfig(**settings["model"]), settings["batch"]
    model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="sdpa").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["optimizer"]["lr"])
    rng = np.random.default_rng(0)
    size, pads = shape["size"], shape["visual_tokens_per_image"]
    ids = rng.integers(0, 2000, (size, shape["sequence_length"]))
    ids[:, FIRST_PAD - 1] = config.vision_start_token_id
    ids[:, FIRST_PAD : FIRST_PAD + pads] = config.image_token_id
    ids[:, FIRST_PAD + pads] = config.vision_end_token_id
    labels = ids.copy()
    labels[:, : FIRST_PAD + pads + 1] = -100
    grid = torch.tensor([shape["image_grid_thw"]] * size)
    input_ids = torch.tensor(ids)
    batch = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "labels": torch.tensor(labels),
        "mm_token_type_ids": (input_ids == config.image_token_id).int(),
        "pixel_values": torch.randn(int(grid.prod(dim=1).sum()), 1536),
        "image_grid_thw": grid,
    }
    times = []
    for _ in range(2 + steps):
        begin = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"step": statistics.median(times[2:]), "peak_rss_mib": peak}))


if __name__ == "__main__":
    main()
