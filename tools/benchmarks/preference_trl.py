"""The step of `preference.py` in TRL's DPOTrainer on torch, with a second model as the reference.

    PYTHON tools/benchmarks/preference_trl.py MODEL PAIRS WARM_UP STEPS      prints a line of JSON

`preference.py --against PYTHON` runs it with an interpreter that has torch, transformers, trl and
datasets; it imports nothing of paddle_vl. The trainer, its collator and HF's processor are used as
they are, with the settings of `preference.py`: float32, no recomputation, no gradient norm.
"""

import argparse
import json
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# Qwen's template around the question, written out so that answers end with their end token.
PROMPT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def rows(file: Path) -> list[dict[str, Any]]:
    """The pairs as TRL's rows of texts, with paths of images."""
    found = []
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        question, chosen = (message["content"] for message in row["messages"])
        found.append(
            {
                "prompt": PROMPT.format(question.replace("<image>", "")),
                "chosen": f"{chosen}<|im_end|>",
                "rejected": f"{row['rejected_response']}<|im_end|>",
                "images": [str(file.parent / name) for name in row["images"]],
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("pairs", type=Path, metavar="PAIRS", help="its rows")
    for name in ("warm_up", "steps"):
        parser.add_argument(name, type=int, metavar=name.upper())
    options = parser.parse_args()
    # Imported here, so that --help needs none of them.
    import datasets  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    import trl  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    times: list[float] = []
    counts = Counter()

    class Clock(transformers.TrainerCallback):
        """Times between the ends of steps, so that each has its batch."""

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            times.append(time.process_time())
            if state.global_step == options.warm_up:
                counts.clear()

    pairs = datasets.Dataset.from_list(rows(options.pairs))
    pairs = pairs.cast_column("images", datasets.List(datasets.Image()))
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.DPOConfig(
            folder, max_steps=options.warm_up + options.steps, use_cpu=True, bf16=False,
            per_device_train_batch_size=len(pairs), gradient_accumulation_steps=1,
            gradient_checkpointing=False, max_grad_norm=0.0, learning_rate=1e-6,
            weight_decay=0.01, lr_scheduler_type="constant", logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, model_init_kwargs={"attn_implementation": "sdpa"},
        )  # fmt: skip
        trainer = trl.DPOTrainer(
            str(options.model), args=settings, train_dataset=pairs, callbacks=[Clock()]
        )
        models = [trainer.model, trainer.ref_model]
        for model in models:
            model.register_forward_pre_hook(lambda layer, inputs: counts.update(passes=1))
            model.model.visual.patch_embed.register_forward_pre_hook(
                lambda layer, inputs: counts.update(patches=inputs[0].shape[0])
            )
        trainer.train()
    found = {
        "cpu": (times[-1] - times[options.warm_up - 1]) / options.steps,
        **{name: number / options.steps for name, number in counts.items()},
        "kept_mb": sum(4 * p.numel() for model in models for p in model.parameters()) / 1e6,
        "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        "tokens": int(trainer.state.log_history[0]["num_tokens"]),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": {each.__name__: each.__version__ for each in (torch, transformers, trl)},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
