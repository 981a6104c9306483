"""What preference training costs: its step against a step of fine-tuning on the same answers.

    python tools/benchmarks/preference.py --against PYTHON      # also TRL's DPOTrainer on torch

The model is that of `configs/bench/qwen3_vl_step.yaml`, in float32. A step has one pair (sigmoid,
one shared image), or its two answers as rows for fine-tuning, all equally long. Every run is a
process of its own, which reads and decodes the same batch again for every step.

Columns: processor time, and its ratio to fine-tuning in the same round; forward passes, each with
both answers; patches that the tower encodes; weights, the reference's too; peak memory. PYTHON has
torch, torchvision and trl; the losses of all steps must be TRL's.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import harness
import step
from harness import Result, Table

WARM_UP, TOLERANCE, FAMILY = 2, 1e-3, "qwen3_vl"
TRL, TUNING, PREFERENCE = "TRL", "fine-tuning", "preference"
SIDES: dict[str, dict[str, str]] = {
    TUNING: {},
    PREFERENCE: {},
    f"{PREFERENCE}, reference in advance": {"preference.precompute_ref_log_probs": "true"},
    f"{PREFERENCE}, LoRA": {"model.lora": "{r: 16, lora_alpha: 32, target_modules: [all-linear]}"},
}
# Tokens of an answer, each a digit; with its end they fill `data.max_length`.
DIGITS = step.WORKLOADS[FAMILY]["answer_tokens"] - 2


def run_config(side: str, work: str) -> Any:
    """The configuration of a side, on what `prepare` has written."""
    from paddle_vl.config.load import load_run_config

    objective, size = ("sft", 2) if side == TUNING else ("preference", 1)
    settings = harness.STEPS_ONLY | {
        "model.config": "null",
        "model.pretrained": f"{work}/base",
        "data.train": f"[{work}/data/{objective}.jsonl]",
        "train.objective": objective,
        "train.per_device_train_batch_size": size,
        "train.learning_rate": 1e-6,
        "train.lr_scheduler_type": "constant",
        "train.output_dir": f"{work}/out",
    }
    return load_run_config(step.CONFIGS[FAMILY], harness.overrides(settings | SIDES[side]))


def prepare(work: str) -> dict[str, Any]:
    """Write the model, the rows and the values of the reference, in this process."""
    from paddle_vl.config.families import family_of_run
    from paddle_vl.families.vlm.inputs.processor import VLProcessor

    data, base = Path(work) / "data", Path(work) / "base"
    trainer = step.build(FAMILY, [], Path(work))
    trainer.runner.model.save_pretrained(base)
    area = trainer.config.data.max_pixels
    processor = VLProcessor.from_pretrained(data / "processor", min_pixels=area, max_pixels=area)
    processor.save_pretrained(base)
    # One of those that `step.build` has made.
    row = json.loads((data / "conversations.jsonl").read_text(encoding="utf-8").split("\n")[0])
    answers, rng = [], np.random.default_rng(0)
    for _ in range(2):
        text = "".join(map(str, rng.integers(0, 10, DIGITS)))
        row["messages"][1] = {"role": "assistant", "content": text}
        answers.append(json.dumps(row) + "\n")
    pair = {**json.loads(answers[0]), "rejected_response": text}
    (data / "sft.jsonl").write_text("".join(answers), encoding="utf-8")
    (data / "preference.jsonl").write_text(json.dumps(pair) + "\n", encoding="utf-8")
    config = run_config(PREFERENCE, work)
    files = family_of_run(config).ask("precompute_reference", config)
    return {"files": [*map(str, files)]}


def measure(side: str, work: str, steps: int) -> dict[str, Any]:
    """Means of a side's timed steps, in this process."""
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.nn.cpu import compiled
    from paddle_vl.train.build import build_trainer

    _ = configure_cpu_runtime(1) and compiled.enable()
    trainer: Any = build_trainer(run_config(side, work), writes=False)
    model, counts, losses, begin = trainer.runner.model, Counter(), [], 0.0
    model.register_forward_pre_hook(lambda layer, inputs: counts.update(passes=1))
    # At its first layer: with a layout from the collator the tower runs by `encode`.
    tower = model.visual.patch_embed
    tower.register_forward_pre_hook(lambda _, inputs: counts.update(patches=inputs[0].shape[0]))
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            begin = time.process_time()
            counts.clear()
        outcome = trainer.train_one_step()
        losses.append(outcome.terms.tolist()[0])
    cpu = (time.process_time() - begin) / steps
    trainer.feed.close()
    # The reference has values of the trained parameters, see `paddle_vl.train.reference`.
    kept = list(model.parameters())
    if getattr(trainer.runner.loss, "has_reference", False):
        kept += [each for each in kept if not each.stop_gradient]
    found = {name: number / steps for name, number in counts.items()}
    found |= {"cpu": cpu, "tokens": outcome.totals.num_tokens, "peak_rss_mib": harness.peak_mib()}
    return found | {"kept_mb": sum(4 * each.size for each in kept) / 1e6, "losses": losses}


def compare(options: argparse.Namespace, work: Path) -> Result:
    """Results of all rounds, by side; they are good if TRL's losses are those here."""
    harness.make_data(FAMILY, work / "data")
    harness.launch(prepare, work / "run", work=work)

    def run(side: str) -> dict[str, Any]:
        if side == TRL:
            inputs = [work / "base", work / "data" / "preference.jsonl", WARM_UP, options.steps]
            return harness.reference(options.against, "trl", *inputs)
        return harness.launch(measure, work / "run", side=side, work=work, steps=options.steps)[0]

    sides = [*SIDES, *([TRL] if options.against else [])]
    rounds = harness.in_rounds(sides, options.rounds, run)
    versions = rounds[0].get(TRL, {}).get("versions", {})
    ours, theirs = ([one[side]["losses"] for one in rounds] for side in (PREFERENCE, sides[-1]))
    apart = np.abs(np.subtract(ours, theirs)).max() if options.against else 0.0
    rows = []
    for side in sides:
        names = ("passes", "patches", "kept_mb", "peak_rss_mib")
        counts = [f"{harness.median(rounds, side, name):.0f}" for name in names]
        cpu = f"{1e3 * harness.median(rounds, side, 'cpu'):.0f}"
        rows.append([side, cpu, harness.ratio(rounds, side, TUNING, "cpu"), *counts])
    note = (
        f"One pair, {rounds[0][TUNING]['tokens']} tokens in a step, float32, one thread, means of "
        f"{options.steps} steps after {WARM_UP}, medians of {options.rounds} run(s)."
    )
    note += f" TRL's losses differ by at most {apart:.0e}." if options.against else ""
    columns = ["", "CPU ms per step", "to fine-tuning", "passes", "patches", "MB of weights"]
    made = Table("preference", [*columns, "peak MiB"], rows, note)
    return Result([made], {"rounds": rounds}, versions, bool(apart < TOLERANCE))


if __name__ == "__main__":
    made = harness.parser(__doc__)
    harness.add_count(made, "steps", 3, "timed steps of a run")
    harness.add_count(made, "rounds", 2, "runs of each side")
    made.add_argument("--against", metavar="PYTHON", help="interpreter with torch and trl")
    sys.exit(harness.run(made, compare))
