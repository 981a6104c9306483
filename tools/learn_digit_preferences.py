"""A test that preference training learns: an answer's style by what an image shows.

    python tools/learn_digit_preferences.py runs/preferences --start runs/digits/run/final

For an even digit "The handwritten digit 4." is preferred to "4", for an odd one the reverse. The
quickstart's model, which the run starts from, never gives the long form to these questions. 640
such pairs of training images, and 640 that keep what the other questions are answered (the right
answer is preferred to a wrong one of its form); two epochs with adapters and an SFT term of 0.5.

Both answers name the digit, and "4" is rejected in every pair that has it: a model that sees no
image can learn all pairs, so that accuracy and margin prove nothing about images. Two figures do.
`by_image`: the test pairs are measured again, each with the image of a digit of the other parity.
The answers' share of the margin stays, the image's share changes its sign, so that half of the
difference of both margins is the image's. Without images it is 0 %; above 50 % images outweigh the
answers, and the mean margin with the wrong images is negative. `style`: a question has no digit, so
that the first token of a greedy answer, which decides its style, comes from the image alone.

`digit`: greedy answers with the right digit. `lost`: how many points of exact answers to the other
questions of the quickstart's test are lost, in the group that loses most.

Exits 1 where a bar is missed: accuracy, style and digit 95 %, margin 1.8, by_image 40 %, lost 5.
--sft 0 is for comparison: without the SFT term the digits are lost.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from make_digits_dataset import TEST_IMAGES_PER_DIGIT, make_digits_dataset, read_digits

QUESTIONS = (
    "<image>Which digit is this?",
    "<image>What number do you see?",
    "<image>Name the digit in the picture.",
    "Read this handwritten digit: <image>",
)
NUM_PAIRS, NUM_KEPT, PAIRS_OF_STEP, EPOCHS = 640, 640, 16, 2
STEPS = EPOCHS * (NUM_PAIRS + NUM_KEPT) // PAIRS_OF_STEP
# The least in percent; the margin in nats times beta.
BARS = {"accuracy": 95.0, "margin": 1.8, "by_image": 40.0, "style": 95.0, "digit": 95.0}
# The most points of exact answers that a group of other questions may lose.
MOST_LOST = 5.0


def answers(digit: int) -> tuple[str, str]:
    """The preferred and the other form."""
    forms = f"The handwritten digit {digit}.", str(digit)
    return forms if digit % 2 == 0 else (forms[1], forms[0])


def write_pairs(data: Path, folder: Path) -> None:
    """Pairs for training and test, the latter also with images of the other parity; and the test's
    questions with the preferred answers."""
    _, digits = read_digits()
    test = _records(data / "test.jsonl")
    tested = sorted({name for row in test for name in row["images"]})
    assert len(tested) == 10 * TEST_IMAGES_PER_DIGIT
    numbers = {name: int(Path(name).stem) for name in tested}
    rng = np.random.default_rng(1)
    left = [n for n in rng.permutation(len(digits)).tolist() if n not in numbers.values()]
    shown = [numbers[name] for name in tested]
    even, odd = ([n for n in shown if digits[n] % 2 == parity] for parity in (0, 1))
    assert len(even) == len(odd), "equally many test images of each digit"
    other = dict(zip(even, rng.permutation(odd).tolist(), strict=True))
    other |= {n: image for image, n in other.items()}
    pairs = {
        "train": [(n, n) for n in left[:NUM_PAIRS]],
        "test": [(n, n) for n in shown],
        "other_parity": [(n, other[n]) for n in shown],
    }
    folder.mkdir(parents=True, exist_ok=True)
    questions = [QUESTIONS[int(i)] for i in rng.integers(len(QUESTIONS), size=NUM_PAIRS)]
    for name, rows in pairs.items():
        lines, plain = [], []
        for question, (number, image) in zip(questions, rows, strict=False):
            chosen, rejected = answers(digits[number])
            row: dict[str, Any] = {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": chosen},
                ],
                "images": [str((data / f"images/{image:04d}.png").resolve())],
            }
            plain.append(json.dumps(row))
            lines.append(json.dumps({**row, "rejected_response": rejected}))
        if name == "train":
            lines += map(json.dumps, _kept(data, rng))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if name == "test":
            (folder / "questions.jsonl").write_text("\n".join(plain) + "\n", encoding="utf-8")


def _records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _kept(data: Path, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Pairs on training records with other questions, equally many of each group: the right answer,
    and another answer to this question that is wrong here."""
    said: dict[str, set[str]] = {}
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in _records(data / "train.jsonl"):
        if (question := _question(row)) not in QUESTIONS:
            said.setdefault(question, set()).add(row["messages"][-1]["content"])
            groups.setdefault(row["task"], []).append(row)
    for rows in groups.values():
        for index in rng.permutation(len(rows))[: NUM_KEPT // len(groups)].tolist():
            row = rows[index]
            others = sorted(said[_question(row)] - {row["messages"][-1]["content"]})
            yield {
                "messages": row["messages"],
                "images": [str((data / name).resolve()) for name in row["images"]],
                "rejected_response": others[rng.integers(len(others))],
            }


def _question(row: dict[str, Any]) -> str:
    """The last one of a record."""
    return row["messages"][-2]["content"]


def learn(pairs: Path, start: Path, out: Path, seed: int, options: argparse.Namespace) -> None:
    """One run of preferences."""
    from paddle_vl.config.load import load_run_config
    from paddle_vl.train.build import build_trainer

    lora = {"r": 8, "lora_alpha": 16, "target_modules": ["all-linear"]}
    preference = {"beta": 0.1, **({"rpo_alpha": options.sft} if options.sft else {})}
    settings = {
        "model": {"pretrained": str(start), "lora": lora},
        "data": {
            "train": [str(pairs / "train.jsonl")],
            "eval": [str(pairs / "test.jsonl"), str(pairs / "other_parity.jsonl")],
            "max_length": 128,
        },
        "preference": preference,
        "train": {
            "objective": "preference",
            "output_dir": str(out),
            "max_steps": STEPS,
            "per_device_train_batch_size": PAIRS_OF_STEP,
            "per_device_eval_batch_size": 50,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "warmup_stable_decay",
            "decay_ratio": 1 - 5 / STEPS,
            "decay_type": "linear",
            "warmup_steps": 5,
            "seed": seed,
            "save_steps": None,
        },
        "logging": {"logging_steps": 5},
    }
    file = out.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    build_trainer(load_run_config(str(file), [])).run()


def greedy_answers(folder: Path, questions: Path, file: Path) -> list[dict[str, Any]]:
    """Generated answers of a model or adapter folder, by `paddle-vl evaluate`'s own code."""
    from paddle_vl.config.families import family_of_folder
    from paddle_vl.families.base import EvaluationOptions
    from paddle_vl.train.evaluate import mean_losses
    from paddle_vl.train.step import ModelRunner

    options = EvaluationOptions([str(questions)], 50, max_new_tokens=16, predictions=file)
    evaluation = family_of_folder(folder).ask("evaluate", folder, options)
    runner = ModelRunner(evaluation.model, evaluation.loss, evaluation.adapter)
    with evaluation.loader as batches:
        losses = mean_losses(runner, batches)
    assert losses is not None, "nobody stops it"
    list(evaluation.report(losses))
    return _records(file)


def exact_by_group(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Percent of exact answers to the questions of the quickstart's test that are not in pairs
    about style."""
    asked = {question.replace("<image>", "") for question in QUESTIONS}
    groups: dict[str, list[bool]] = {}
    for row in rows:
        if row["prompt"] not in asked:
            # A description is asked alone and in dialogues.
            group = "describe" if row["prompt"] == "Describe the picture." else row["task"]
            groups.setdefault(group, []).append(row["is_exact"])
    return {group: 100 * float(np.mean(exact)) for group, exact in sorted(groups.items())}


def measured(pairs: Path, data: Path, out: Path, of_start: dict[str, float]) -> dict[str, float]:
    """Figures of a finished run; `of_start`: `exact_by_group` of the model that it started from."""
    line = _records(out / "metrics.jsonl")[-1]
    rows = greedy_answers(out / "final", pairs / "questions.jsonl", out / "answers.jsonl")
    keys = ("answer", "expected")
    is_long, wanted_long = ([row[key].startswith("The") for row in rows] for key in keys)
    found, wanted = (["".join(filter(str.isdigit, row[key])) for row in rows] for key in keys)
    margin, of_other = (line[f"eval_rewards/margins/{name}"] for name in ("test", "other_parity"))
    others = exact_by_group(
        greedy_answers(out / "final", data / "test.jsonl", out / "other_answers.jsonl")
    )
    return {
        "accuracy": 100 * line["eval_rewards/accuracies/test"],
        "margin": margin,
        "by_image": 100 * (margin - of_other) / 2 / margin,
        "style": 100 * float(np.mean(np.equal(is_long, wanted_long))),
        "digit": 100 * float(np.mean(np.equal(found, wanted))),
        **others,
        "lost": max(of_start[group] - others[group] for group in others),
        "logps_chosen": line["eval_logps/chosen/test"],
        "logps_rejected": line["eval_logps/rejected/test"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("output", type=Path, help="folder for data, runs and results")
    parser.add_argument("--start", type=Path, required=True, help="the quickstart's model folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sft", type=float, default=0.5, help="weight of the chosen answers' loss")
    options = parser.parse_args(arguments)

    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.nn.cpu import compiled

    if configure_cpu_runtime():
        compiled.enable()
    data, pairs = options.output / "digits", options.output / "pairs"
    make_digits_dataset(data)
    write_pairs(data, pairs)
    of_start = exact_by_group(
        greedy_answers(options.start, data / "test.jsonl", options.output / "start_answers.jsonl")
    )
    is_missed = False
    for seed in options.seeds:
        out = options.output / f"sft{options.sft}_seed{seed}"
        if not (out / "final").is_dir():
            learn(pairs, options.start, out, seed, options)
        figures = measured(pairs, data, out, of_start)
        below = [name for name, low in BARS.items() if not figures[name] >= low]
        below += ["lost"] * (not figures["lost"] <= MOST_LOST)
        is_missed |= bool(below)
        shown = "  ".join(f"{name} {value:.2f}" for name, value in figures.items())
        print(f"{out.name}: {shown}{'  MISSED ' + ', '.join(below) if below else ''}", flush=True)
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
