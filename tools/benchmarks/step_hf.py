"""The step of `step.py --family qwen3_vl` or `qwen3_5` in HF transformers on torch (sdpa).

    PYTHON tools/benchmarks/step_hf.py CONFIG STEPS THREADS     prints one line of JSON
    PYTHON tools/benchmarks/step_hf.py CONFIG STEPS THREADS --tokens N      of answers of N tokens

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
# Configuration and model by the `model_type` of a configuration file.
CLASSES = {
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration"),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
}
# Prompts that are answered at once.
BATCHES = (1,)


def samples(config: Any, settings: dict[str, Any], size: int) -> dict[str, np.ndarray]:
    """Inputs of so many samples of one image each, with random text behind the image."""
    vision, data = config.vision_config, settings["data"]
    side = int(data["max_pixels"] ** 0.5) // vision.patch_size
    pads = (side // vision.spatial_merge_size) ** 2
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 200, (size, data["max_length"]))
    ids[:, FIRST_PAD - 1] = config.vision_start_token_id
    ids[:, FIRST_PAD : FIRST_PAD + pads] = config.image_token_id
    ids[:, FIRST_PAD + pads] = config.vision_end_token_id
    patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "pixel_values": rng.standard_normal((size * side**2, patch_dim), np.float32),
        "image_grid_thw": np.array([[1, side, side]] * size),
    }


def answer_seconds(model: Any, settings: dict[str, Any], tokens: int) -> dict[str, float]:
    """Processor time to the first token and per further token, by number of prompts.

    The least of three answers; with one thread and nothing beside it, the time of the clock.
    """
    import torch  # pyright: ignore[reportMissingImports]

    model.eval()
    model.generation_config.eos_token_id = None
    found = {}
    for size in BATCHES:
        given = {k: torch.tensor(v) for k, v in samples(model.config, settings, size).items()}
        given["mm_token_type_ids"] = (given["input_ids"] == model.config.image_token_id).int()
        runs = []
        for _ in range(4):
            times = [time.process_time()]

            def goes_on(ids: Any, scores: Any, times: list[float] = times) -> Any:
                times.append(time.perf_counter())
                return torch.zeros(len(ids), dtype=torch.bool)

            model.generate(
                **given, max_new_tokens=tokens, do_sample=False, stopping_criteria=[goes_on]
            )
            runs.append((times[1] - times[0], (times[-1] - times[1]) / (tokens - 1)))
        # The first run warms up.
        found[f"first of {size}"], found[f"next of {size}"] = map(min, zip(*runs[1:], strict=True))
    return found


def step_seconds(model: Any, settings: dict[str, Any], steps: int) -> dict[str, float]:
    """Median of the training steps on one batch, and processor time per step."""
    import torch  # pyright: ignore[reportMissingImports]

    train = settings["train"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train["learning_rate"], weight_decay=train["weight_decay"]
    )
    size = train["per_device_train_batch_size"]
    made = samples(model.config, settings, size)
    batch = {name: torch.tensor(value) for name, value in made.items()}
    is_image = batch["input_ids"] == model.config.image_token_id
    batch["mm_token_type_ids"] = is_image.int()
    # The prompt ends with its image.
    behind = is_image.int().cumsum(-1) == is_image.sum(-1, keepdim=True)
    is_answer = behind & ~is_image & (batch["input_ids"] != model.config.vision_end_token_id)
    batch["labels"] = batch["input_ids"].masked_fill(~is_answer, -100)
    times, begin_cpu = [], 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            begin_cpu = time.process_time()
        begin = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    cpu = (time.process_time() - begin_cpu) / steps
    return {"step": statistics.median(times[WARM_UP:]), "cpu": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("config", metavar="CONFIG", help="configs/bench/FAMILY_step.yaml")
    parser.add_argument("steps", metavar="STEPS", type=int)
    parser.add_argument("threads", metavar="THREADS", type=int)
    parser.add_argument("--tokens", type=int, help="answer with so many tokens, without training")
    options = parser.parse_args()
    # Imported here, so that --help needs neither.
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    import yaml

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with open(options.config, encoding="utf-8") as file:
        settings = yaml.safe_load(file)
    values = settings["model"]["config"]
    config_class, model_class = (
        getattr(transformers, name) for name in CLASSES[values.get("model_type", "qwen3_vl")]
    )
    config = config_class(**values, **IDS)
    model = model_class._from_config(config, attn_implementation="sdpa").float()
    if options.tokens:
        seconds = answer_seconds(model, settings, options.tokens)
    else:
        seconds = step_seconds(model, settings, options.steps)
    found = {
        "seconds": seconds,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
