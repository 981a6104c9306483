"""A tiny run that samples answers to prompts and learns from their rewards."""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.single_card_tests.train.tiny_run import MODEL, write_records
from tests.support.preference_runs import write_base
from tests.support.topology_runs import write_mixed_run

# Of letters, so that answers of random weights differ.
REWARDS = """
def letters(completions, solution, **_):
    return [
        float(sum(letter in "aeiou0123456789" for letter in each[0]["content"]))
        for each in completions
    ]


def of_red(completions, solution, **_):
    return [float(number % 2) if colour == "red" else 1.0 for number, colour in enumerate(solution)]


def same(completions, **_):
    return [1.0] * len(completions)
"""
# A generation has four updates.
SAMPLED = (
    *("train.objective=grpo", "grpo.num_generations=2", "grpo.max_completion_length=4"),
    *("grpo.num_iterations=2", "grpo.steps_per_generation=4", "grpo.beta=0.04"),
    *("grpo.temperature=0.9", "train.learning_rate=0.05"),
)


def write_sampled_run(folder: Path, model: dict[str, Any] = MODEL) -> Path:
    """Prompts with two images, one or none, in the file `train.jsonl`; of the last three
    `test.jsonl`; the base model in `base`."""
    run_file = write_mixed_run(folder, 24, model)
    # The same answers everywhere.
    write_base(run_file, model, seed=3)
    rows = [json.loads(line) for line in run_file.with_name("train.jsonl").read_text().splitlines()]
    prompts = [
        {"messages": row["messages"][:1], "images": row["images"],
         "solution": row["messages"][1]["content"]}
        for row in rows
    ]  # fmt: skip
    write_records(run_file.with_name("train.jsonl"), prompts)
    write_records(run_file.with_name("test.jsonl"), [row | {"task": "red"} for row in prompts[-3:]])
    run_file.with_name("my_rewards.py").write_text(REWARDS, encoding="utf-8")
    config = yaml.safe_load(run_file.read_text(encoding="utf-8"))
    config["grpo"] = {"rewards": [f"{run_file.with_name('my_rewards.py')}:letters"]}
    config["model"] = {"pretrained": str(run_file.with_name("base"))}
    run_file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return run_file
