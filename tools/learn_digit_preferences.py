"""A test that preference training learns: an answer's style by what an image shows.

    python tools/learn_digit_preferences.py runs/preferences --start runs/digits/run/final [--lora]

For an even digit "The handwritten digit 4." is preferred to "4", for an odd one the reverse. The
quickstart's model, which the run starts from, never gives the long form to these questions. 640
pairs of training images, three epochs; measured on the 300 test images. Prints, for each seed,
accuracy and margin of the rewards, how much of the margin images make, and of greedy answers how
many follow the style and how many have the right digit. Without --start the quickstart's model is
trained first.

Both answers name the digit, and "4" is rejected in every pair that has it: a model that sees no
image can learn all pairs, so that accuracy and margin prove nothing about images. Two figures do.
`by_image`: the test pairs are measured again, each with the image of a digit of the other parity.
The answers' share of the margin stays, the image's share changes its sign, so that half of the
difference of both margins is the image's. Without images it is 0 %; above 50 % images outweigh the
answers, and the mean margin with the wrong images is negative. `style`: a question has no digit, so
that the first token of a greedy answer, which decides its style, comes from the image alone.
(Answers that name the digit shown, labelled by the digit of another row, are half right whatever a
model does: no control.)

Exits 1 where a bar is missed: reward accuracy 95 %, margin 1.8, by_image 40 %, style 80 % (with
adapters 90 %).
"""

import argparse
import json
import sys
from collections.abc import Sequence
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
ROOT = Path(__file__).parents[1]
NUM_PAIRS, STEPS, PAIRS_OF_STEP = 640, 120, 16
# The least of rewards, in percent; the margin in nats times beta.
BARS = {"accuracy": 95.0, "margin": 1.8, "by_image": 40.0}


def answers(digit: int) -> tuple[str, str]:
    """The preferred and the other form."""
    forms = f"The handwritten digit {digit}.", str(digit)
    return forms if digit % 2 == 0 else (forms[1], forms[0])


def write_pairs(data: Path, folder: Path) -> None:
    """Pairs for training and test, the latter also with images of the other parity; and the test's
    questions with the preferred answers."""
    _, digits = read_digits()
    test = [json.loads(line) for line in (data / "test.jsonl").read_text().splitlines()]
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
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if name == "test":
            (folder / "questions.jsonl").write_text("\n".join(plain) + "\n", encoding="utf-8")


def train_start(data: Path, folder: Path) -> Path:
    """The quickstart's model, trained unless it is there."""
    from paddle_vl.config.load import load_run_config
    from paddle_vl.train.build import build_trainer

    if not (folder / "final").is_dir():
        config = load_run_config(
            str(ROOT / "configs" / "quickstart" / "digits.yaml"),
            [
                f"data.train=[{data / 'train.jsonl'}, {data / 'copies.jsonl'}]",
                f"data.processor={data / 'processor'}",
                *("data.eval=[]", "train.eval_steps=null", "train.resume_from_checkpoint=none"),
                f"train.output_dir={folder}",
            ],
        )
        build_trainer(config).run()
    return folder / "final"


def learn(pairs: Path, start: Path, out: Path, seed: int, options: argparse.Namespace) -> None:
    """One run of preferences."""
    from paddle_vl.config.load import load_run_config
    from paddle_vl.train.build import build_trainer

    lora = {"r": 8, "lora_alpha": 16, "target_modules": ["all-linear"]} if options.lora else None
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
            "learning_rate": 1e-3 if options.lora else 1e-4,
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


def measured(pairs: Path, out: Path) -> dict[str, float]:
    """Figures of a finished run."""
    from paddle_vl.config.families import family_of_folder
    from paddle_vl.families.base import EvaluationOptions
    from paddle_vl.train.evaluate import mean_losses
    from paddle_vl.train.step import ModelRunner

    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    answers_file = out / "answers.jsonl"
    options = EvaluationOptions(
        [str(pairs / "questions.jsonl")], 50, max_new_tokens=16, predictions=answers_file
    )
    folder = out / "final"
    evaluation = family_of_folder(folder).recipe_class().evaluation(folder, options)
    runner = ModelRunner(evaluation.model, evaluation.loss, evaluation.adapter)
    with evaluation.loader as batches:
        losses = mean_losses(runner, batches)
    assert losses is not None, "nobody stops it"
    list(evaluation.report(losses))
    rows = [json.loads(text) for text in answers_file.read_text().splitlines()]
    keys = ("answer", "expected")
    is_long, wanted_long = ([row[key].startswith("The") for row in rows] for key in keys)
    found, wanted = (["".join(filter(str.isdigit, row[key])) for row in rows] for key in keys)
    margin, of_other = (line[f"eval_rewards/margins/{name}"] for name in ("test", "other_parity"))
    return {
        "accuracy": 100 * line["eval_rewards/accuracies/test"],
        "margin": margin,
        "by_image": 100 * (margin - of_other) / 2 / margin,
        "style": 100 * float(np.mean(np.equal(is_long, wanted_long))),
        "digit": 100 * float(np.mean(np.equal(found, wanted))),
        "logps_chosen": line["eval_logps/chosen/test"],
        "logps_rejected": line["eval_logps/rejected/test"],
    }


def missed(figures: dict[str, float], is_lora: bool) -> list[str]:
    """Names of the figures that are below their bars."""
    bars = {**BARS, "style": 90.0 if is_lora else 80.0}
    return [name for name, low in bars.items() if not figures[name] >= low]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("output", type=Path, help="folder for data, runs and results")
    parser.add_argument("--start", type=Path, help="a model folder (default: train the quickstart)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lora", action="store_true", help="adapters of rank 8 on all linears")
    parser.add_argument("--sft", type=float, default=0.0, help="weight of the chosen answers' loss")
    options = parser.parse_args(arguments)

    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.nn.cpu import compiled

    if configure_cpu_runtime():
        compiled.enable()
    data, pairs = options.output / "digits", options.output / "pairs"
    make_digits_dataset(data)
    write_pairs(data, pairs)
    start = options.start or train_start(data, options.output / "start")
    kind = ("lora" if options.lora else "full") + (f"_sft{options.sft}" if options.sft else "")
    is_missed = False
    for seed in options.seeds:
        out = options.output / f"{kind}_seed{seed}"
        if not (out / "final").is_dir():
            learn(pairs, start, out, seed, options)
        figures = measured(pairs, out)
        below = missed(figures, options.lora)
        is_missed |= bool(below)
        shown = "  ".join(f"{name} {value:.2f}" for name, value in figures.items())
        print(f"{out.name}: {shown}{'  MISSED ' + ', '.join(below) if below else ''}", flush=True)
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
