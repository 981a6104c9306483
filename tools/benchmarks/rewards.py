"""Times of an update of learning from rewards: sampling, rewards, loss and optimizer, beside TRL's.

    python tools/benchmarks/rewards.py --against PYTHON
    python tools/benchmarks/rewards.py --tokens 16 --prompts 4

The model of `configs/bench/qwen3_vl_step.yaml` with fresh weights answers prompts of one image, 256
visual tokens, eight times each, and learns the answers of each update at once, in float32, on one
thread. Reported are sampled tokens per second of an update, of processor time and by the clock,
medians over updates, and the peak memory of the process. Every round runs every side in a process
of its own, on the same folder of weights, prompts and rewards; ratios are medians over rounds.
`--against PYTHON` is an interpreter with torch, transformers and trl, whose GRPOTrainer samples
with transformers' `generate` and checkpoints no activations.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import yaml

import answers
import harness
import references
from harness import Result, Round, Table

OURS, TRL = "paddle-vl", "TRL"
GROUP = 8
QUESTIONS = ("Which digit is this?", "What number do you see?", "Name the digit in the picture.")
# Counts the tokens that it scores, beside itself.
REWARD = """
from pathlib import Path


def odd_share(completion_ids, **_):
    with Path(__file__).with_name("counts.txt").open("a") as file:
        print(sum(map(len, completion_ids)), file=file)
    return [sum(each % 2 for each in ids) / len(ids) for ids in completion_ids]
"""


def write_inputs(work: str, num_prompts: int, tokens: int) -> dict[str, Any]:
    """Write weights, processor, prompts, reward and settings, of all sides."""
    from paddle_vl.families.vlm.inputs.processor import VLProcessor

    folder, settings = Path(work), answers.settings_of("qwen3_vl")
    processor = VLProcessor.from_pretrained(folder / "data" / "processor")
    ids = {name: getattr(processor, name) for name in references.IDS}
    answers.build("qwen3_vl", settings["model"]["config"] | ids).save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    pixels = settings["data"]["max_pixels"]
    file = folder / "model" / "preprocessor_config.json"
    size = {"shortest_edge": pixels, "longest_edge": pixels}
    values = {"size": size, "min_pixels": pixels, "max_pixels": pixels}
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    images = sorted((folder / "data" / "images").glob("????.png"))
    rows = [
        {
            "messages": [{"role": "user", "content": f"<image>{QUESTIONS[n % len(QUESTIONS)]}"}],
            "images": [str(images[n])],
        }
        for n in range(8 * num_prompts)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "reward.py").write_text(REWARD)
    train = settings["train"]
    given = {
        "rows": num_prompts * GROUP,
        "num_generations": GROUP,
        "max_completion_length": tokens,
        "learning_rate": train["learning_rate"],
        "weight_decay": train["weight_decay"],
    }
    (folder / "settings.json").write_text(json.dumps(given))
    return given


def run_settings(folder: Path) -> dict[str, Any]:
    """Sections of the run file of our side."""
    given = json.loads((folder / "settings.json").read_text())
    return {
        "model": {"pretrained": str(folder / "model")},
        "data": {"train": [str(folder / "prompts.jsonl")], "max_length": 1024},
        "grpo": {
            "rewards": [f"{folder / 'reward.py'}:odd_share"],
            "num_generations": given["num_generations"],
            "max_completion_length": given["max_completion_length"],
        },
        "train": {
            "objective": "grpo",
            "output_dir": str(folder / "out"),
            "max_steps": 10**6,
            "per_device_train_batch_size": given["rows"],
            "learning_rate": given["learning_rate"],
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "weight_decay": given["weight_decay"],
            "max_grad_norm": 1.0,
            "save_steps": None,
        },
        "logging": {"progress_bar": False},
    }


def measure(work: str, steps: int) -> dict[str, Any]:
    """Times of our updates, in this process."""
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.config.load import load_run_config
    from paddle_vl.nn.cpu import compiled
    from paddle_vl.train.build import build_trainer

    is_compiled = configure_cpu_runtime(1) and compiled.enable()
    folder = Path(work)
    (folder / "run.yaml").write_text(yaml.safe_dump(run_settings(folder)))
    (folder / "counts.txt").unlink(missing_ok=True)
    trainer = build_trainer(load_run_config(str(folder / "run.yaml"), []), writes=False)
    clocks = [(time.process_time(), time.perf_counter())]
    for _ in range(references.WARM_UP + steps):
        outcome = trainer.train_one_step()
        assert outcome is not None, "nobody stops it"
        outcome.terms.numpy()
        clocks.append((time.process_time(), time.perf_counter()))
    trainer.feed.close()
    return {
        **references.update_speed(clocks, folder / "counts.txt"),
        "is_compiled": is_compiled,
        "peak_rss_mib": harness.peak_mib(),
    }


def compare(options: argparse.Namespace, work: Path) -> Result:
    """Results of all rounds, by side."""
    harness.make_data("qwen3_vl", work / "data")
    given = {"work": work, "num_prompts": options.prompts, "tokens": options.tokens}
    harness.launch(write_inputs, work / "run", **given)

    def speeds(side: str) -> dict[str, Any]:
        if side == TRL:
            return harness.reference(options.against, "trl", work, options.steps, 1)
        return harness.launch(measure, work / "run", work=work, steps=options.steps)[0]

    sides = [OURS, TRL] if options.against else [OURS]
    rounds = harness.in_rounds(sides, options.rounds, speeds)
    versions = rounds[0].get(TRL, {}).get("versions", {})
    return Result([table(rounds)], {"rounds": rounds}, versions)


def table(rounds: list[Round]) -> Table:
    """A row per side, with ratios to TRL's."""
    names = {"cpu": "tokens per second, processor", "clock": "tokens per second, clock",
             "peak_rss_mib": "peak memory, MiB"}  # fmt: skip
    rows = []
    for side in rounds[0]:
        cells = [f"{harness.median(rounds, side, name):.0f}" for name in names]
        if side == OURS and TRL in rounds[0]:
            ratios = [harness.ratio(rounds, OURS, TRL, name) for name in names]
            cells = [f"{cell}, {each} times" for cell, each in zip(cells, ratios, strict=True)]
        rows.append([side, *cells])
    return Table("rewards speed", ["side", *names.values()], rows)


def main() -> int:
    made = harness.parser(__doc__)
    made.add_argument("--against", metavar="PYTHON", help="interpreter with torch and trl")
    for name, default, text in (
        ("prompts", 2, "prompts of an update, of eight answers"),
        ("tokens", 64, "longest answer"),
        ("steps", 2, "updates that are timed"),
        ("rounds", 3, "processes of each side"),
    ):
        harness.add_count(made, name, default, text)
    return harness.run(made, compare)


if __name__ == "__main__":
    sys.exit(main())
