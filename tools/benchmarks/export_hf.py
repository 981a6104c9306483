"""The answers of `export.py` in HF transformers on torch (sdpa).

    PYTHON tools/benchmarks/export_hf.py CONFIG TOKENS REPEATS THREADS BATCH...

prints one line of JSON. `export.py --against PYTHON` runs it with an interpreter that has torch,
transformers and PyYAML; it imports nothing of paddle_vl.
"""

import argparse
import json
import resource
import statistics
import time

import numpy as np

IDS = {"image_token_id": 2040, "vision_start_token_id": 2041, "vision_end_token_id": 2042,
       "video_token_id": 2043}  # fmt: skip


class Clock:
    """A streamer: the time of every token."""

    def __init__(self):
        self.times = []

    def put(self, value) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("config", metavar="CONFIG", help="configs/bench/qwen3_vl_step.yaml")
    for name in ("tokens", "repeats", "threads"):
        parser.add_argument(name, metavar=name.upper(), type=int)
    parser.add_argument("batches", metavar="BATCH", type=int, nargs="+")
    options = parser.parse_args()
    # Imported here, so that --help needs neither.
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    import yaml
    from transformers import (  # pyright: ignore[reportMissingImports]
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with open(options.config, encoding="utf-8") as file:
        settings = yaml.safe_load(file)
    config = Qwen3VLConfig(**settings["model"]["config"], **IDS)
    model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="sdpa").float()
    model.eval()
    vision, data = config.vision_config, settings["data"]
    side = int(data["max_pixels"] ** 0.5) // vision.patch_size
    pads = (side // vision.spatial_merge_size) ** 2
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    seconds = {}
    for size in options.batches:
        ids = np.random.default_rng(0).integers(0, 200, (size, data["max_length"]))
        ids[:, 10] = config.vision_start_token_id
        ids[:, 11 : 11 + pads] = config.image_token_id
        ids[:, 11 + pads] = config.vision_end_token_id
        input_ids = torch.tensor(ids)
        batch = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "mm_token_type_ids": (input_ids == config.image_token_id).int(),
            "pixel_values": torch.randn(size * side**2, patch),
            "image_grid_thw": torch.tensor([[1, side, side]] * size),
        }
        runs = []
        for _ in range(options.repeats + 1):
            clock, begin = Clock(), time.perf_counter()
            with torch.no_grad():
                model.generate(
                    **batch,
                    do_sample=False,
                    min_new_tokens=options.tokens,
                    max_new_tokens=options.tokens,
                    streamer=clock,
                    pad_token_id=0,
                )
            # The streamer gets the prompt first.
            first, *_, last = clock.times[1:]
            runs.append({"first": first - begin, "rest": last - first})
        seconds[size] = {
            name: statistics.median(run[name] for run in runs[1:]) for name in ("first", "rest")
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"seconds": seconds, "peak_rss_mib": peak, "versions": versions}))


if __name__ == "__main__":
    main()
