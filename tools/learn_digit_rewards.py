"""A test that learning from rewards learns: two questions that a model was never asked.

    python tools/learn_digit_rewards.py runs/rewards --start runs/digits/run/final \\
        --write-doc docs/grpo.md

The quickstart's model knows "Is it even or odd?" and "Which digit comes next?" as second questions
only, after its own answer. `configs/quickstart/digits_grpo.yaml` asks them about an image, and
rewards an exact answer. With each seed, by `paddle-vl`:

- recipe: that file, whose prompts have comparisons and sums too, which the model knows
- shuffled: the same with the rewards of each round in another order

and with the first seed and the two questions alone:

- alone: the recipe otherwise
- plain: without dynamic sampling, until it has sampled as many answers

and, to see what a sick run looks like:

- blank: on blank images
- unanswerable: with right answers in words that the model never gives
- fast: five times the learning rate, without dynamic sampling

`choice` has settings, with seeds of their own, measured on images of the training conversations
that the prompts leave out. All other figures are greedy answers about test images, percent exact:
the two questions with their images, with blank ones and with those of other digits, and the
questions of the training conversations.

Exits 1 where a bar is missed. A run that is there already is only measured.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).parent / "benchmarks"))

import harness
from learn_documents import command, trained
from make_digits_dataset import IMAGE_SIDE, make_digits_dataset, write_prompts

CONFIG = harness.ROOT / "configs" / "quickstart" / "digits_grpo.yaml"
PICTURE = harness.ROOT / "docs" / "images" / "grpo.svg"
QUESTIONS = ("parity", "next")
OLD = ("single", "two_turn", "compare", "add")
PLAIN = "grpo.dynamic_sample=false"
ALONE, BOTH = ("prompts",), ("prompts", "old_prompts")
ANSWERS_OF_UPDATE, UPDATES = 16 * 8, 40
_CONSTANT, _FEW = "train.lr_scheduler_type=constant", "grpo.max_resample_times=3"
_FALLS = ("train.lr_scheduler_type=warmup_stable_decay", "train.decay_ratio=0.3")
# Settings, files of prompts, and seeds.
CHOICE = {
    "2e-4, plain": ((_CONSTANT, PLAIN), ALONE, (0,)),
    "2e-4, dynamic": ((_CONSTANT, _FEW), ALONE, (0,)),
    "2e-4, dynamic, old prompts": ((_CONSTANT, _FEW), BOTH, (11, 12, 13)),
    "the last, 8 rounds": ((_CONSTANT,), BOTH, (11,)),
    "8 rounds, constant, then falling": (_FALLS, BOTH, (11, 12)),
    "8 rounds, cosine, 3e-4": (("train.learning_rate=3e-4",), BOTH, (11,)),
    "8 rounds, cosine": ((), BOTH, (11, 12, 13)),
}
KINDS = ("recipe", "shuffled", "alone", "plain")
SICK = {
    "blank": "trained on blank images",
    "unanswerable": "right answers that are never sampled",
    "fast": "learning rate 1e-3",
}
# Percent: the least of the questions, and points off chance, lost by an old task; shuffled: below.
LEAST, OFF_CHANCE, MOST_LOST, MOST_SHUFFLED = 98, 3, 2, 75
CHANCE = {"parity": 50, "next": 10}


# The reward of `shuffled`: those of exact answers, each given to some other answer.
SHUFFLED = """
import numpy as np


def shuffled_match(completions, solution, trainer_state):
    found = [float(c[0]["content"] == s) for c, s in zip(completions, solution, strict=True)]
    return np.random.default_rng(trainer_state.global_step).permutation(found).tolist()
"""


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _write(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_questions(data: Path) -> None:
    """What is measured after a run, and the prompts of `blank` and `unanswerable`."""
    make_digits_dataset(data)
    write_prompts(data)
    (data / "shuffled.py").write_text(SHUFFLED, encoding="utf-8")
    Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "white").save(data / "blank.png")
    asked = _rows(data / "test_prompts.jsonl")
    images = [row["images"] for row in asked]
    # Of two questions about each image, the same number of images on.
    others = np.roll(np.arange(len(images)), 2 * np.random.default_rng(1).integers(1, 300))
    measured = _rows(data / "test_tasks.jsonl")
    for suffix, shown in (
        ("", images),
        ("_blank", [["blank.png"]] * len(images)),
        ("_other", [images[number] for number in others]),
    ):
        measured += [
            _answered(row) | {"task": row["task"] + suffix, "images": image}
            for row, image in zip(asked, shown, strict=True)
        ]
    _write(data / "measured.jsonl", measured)
    asked = map(_answered, _rows(data / "validation_prompts.jsonl"))
    _write(data / "validated.jsonl", [*asked, *_rows(data / "validation_tasks.jsonl")])
    prompts = _rows(data / "prompts.jsonl")
    _write(data / "blank.jsonl", [row | {"images": ["blank.png"]} for row in prompts])
    _write(
        data / "unanswerable.jsonl",
        [row | {"solution": f"I think it is {row['solution']}"} for row in prompts],
    )


def _answered(row: dict[str, Any]) -> dict[str, Any]:
    """A prompt as a conversation."""
    answer = {"role": "assistant", "content": row["solution"]}
    return {
        "task": row["task"],
        "messages": [*row["messages"], answer],
        "images": row["images"],
    }


def exact(model: Path, data: Path, folder: Path) -> dict[str, float]:
    """Percent of exact answers of a model, by the tasks of a file of questions."""
    file = folder / f"{data.stem}_scores.json"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command(
            *("evaluate", "--model", model, "--data", data, "--metrics", "exact_match"),
            *("--batch-size", 100, "--max-new-tokens", 16, "--json", file),
        )
    scores = json.loads(file.read_text(encoding="utf-8"))["scores"]
    return {task: 100 * of["exact_match"] for task, of in scores.items()}


class Trial:
    """Runs of a folder from a start.

    Attributes:
        minutes: processor time of each run, of all threads together.
    """

    def __init__(self, folder: Path, start: Path):
        self.data, self._folder, self._start = folder / "data", folder, start
        self.minutes: dict[str, float] = {}
        write_questions(self.data)

    def run(self, name: str, seed: int, *settings: str, prompts: Sequence[str] = ALONE) -> None:
        """Train, unless the run is there."""
        data = self.data
        files = ", ".join(f"{data / each}.jsonl" for each in prompts)
        self.minutes[name] = trained(
            name, self._folder, CONFIG, f"model.pretrained={self._start}",
            f"data.train=[{files}]", f"train.seed={seed}",
            f"data.eval=[{data}/validation_prompts.jsonl]", "train.eval_steps=5",
            "train.eval.num_samples=null", "train.save_steps=null", *settings,
        )  # fmt: skip

    def seeded(self, seed: int) -> list[str]:
        """Train the recipe and its control with a seed; returns their names."""
        recipe, shuffled = names = [f"recipe{seed}", f"shuffled{seed}"]
        self.run(recipe, seed, prompts=BOTH)
        reward = f"grpo.rewards=['{self.data / 'shuffled.py'}:shuffled_match']"
        self.run(shuffled, seed, reward, prompts=BOTH)
        return names

    def alone(self, seed: int) -> list[str]:
        """Train without old prompts; returns the names."""
        alone, plain = names = [f"alone{seed}", f"plain{seed}"]
        self.run(alone, seed)
        updates = -(-self.lines(alone)[-1]["completions"] // ANSWERS_OF_UPDATE)
        self.run(plain, seed, PLAIN, f"train.max_steps={updates}")
        return names

    def sick(self, seed: int) -> None:
        """Train the runs that are to look sick."""
        self.run("blank", seed, prompts=["blank"])
        self.run("unanswerable", seed, prompts=["unanswerable"])
        self.run("fast", seed, "train.learning_rate=1e-3", PLAIN)

    def chosen(self) -> dict[str, list[dict[str, float]]]:
        """Percent exact on validation images, of the start and by settings, of each seed."""
        found = {"start": [self.exact("start", "validated")]}
        for number, (name, (settings, prompts, seeds)) in enumerate(CHOICE.items()):
            found[name] = []
            for seed in seeds:
                run = f"choice{number + 1}_{seed}"
                self.run(run, seed, *settings, prompts=prompts)
                found[name].append(self.exact(run, "validated"))
        return found

    def exact(self, name: str, questions: str) -> dict[str, float]:
        """Percent of exact answers of a run, or of the start, by task."""
        folder = self._folder / name
        return exact(
            self._start if name == "start" else folder / "final",
            self.data / f"{questions}.jsonl",
            folder,
        )

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Of a run's metrics."""
        return _rows(self._folder / name / "metrics.jsonl")


def missed(found: Mapping[str, dict[str, float]]) -> list[str]:
    """What is not as it should be."""
    start, problems = found["start"], []
    for name, of in found.items():
        if name.startswith("recipe"):
            bars = {task: of[task] >= LEAST for task in QUESTIONS}
            bars |= {
                f"{task}_blank": abs(of[f"{task}_blank"] - CHANCE[task]) <= OFF_CHANCE
                for task in QUESTIONS
            }
            bars |= {task: start[task] - of[task] <= MOST_LOST for task in OLD}
        elif name.startswith("shuffled"):
            bars = {task: of[task] < MOST_SHUFFLED for task in QUESTIONS}
        else:
            continue
        problems += [f"{name}: MISSED {t} {of[t]:.1f}" for t, is_met in bars.items() if not is_met]
    return problems


def lost(start: Mapping[str, float], run: Mapping[str, float]) -> float:
    """Points of exact answers that a run has lost, in the old task that loses most."""
    return max(start[task] - run[task] for task in OLD)


def learned_table(found: Mapping[str, dict[str, float]], trial: Trial) -> harness.Table:
    """A row for each kind of run, with the figures of its seeds one after the other."""
    columns = ["run", *QUESTIONS, *(f"{task}, blank" for task in QUESTIONS),
               *(f"{task}, other" for task in QUESTIONS), "lost", "answers", "minutes"]  # fmt: skip
    tasks = [task + each for each in ("", "_blank", "_other") for task in QUESTIONS]
    rows = []
    for kind in ("start", *KINDS):
        names = [name for name in found if name.rstrip("0123456789") == kind]
        cells = ["/".join(f"{found[name][task]:.1f}" for name in names) for task in tasks]
        cells.append("/".join(f"{lost(found['start'], found[name]):.1f}" for name in names))
        if kind == "start":
            cells += ["-", "-"]
        else:
            answers = [trial.lines(name)[-1]["completions"] for name in names]
            cells.append("/".join(str(each) for each in answers))
            cells.append("/".join(f"{trial.minutes[name]:.1f}" for name in names))
        rows.append([kind, *cells])
    return harness.Table("rewards learned", columns, rows)


def signs_table(names: Sequence[str], trial: Trial, found: Mapping[str, Any]) -> harness.Table:
    """What metrics say at the end of a healthy run and of sick ones, means of ten updates."""
    keys = {"reward": "reward", "prompts/without_signal": "without signal", "entropy": "entropy"}
    columns = ["run", *keys.values(), "updates without", "exact", "exact, blank"]
    rows = []
    for name in names:
        lines = trial.lines(name)
        values = [[x[key] for x in lines[-10:] if x.get(key) is not None] for key in keys]
        cells = [f"{np.mean(each):.2f}" if each else "none" for each in values]
        cells.append(f"{lines[-1]['updates_without_signal']} of {lines[-1]['step']}")
        cells += [f"{np.mean([found[name][t + e] for t in QUESTIONS]):.1f}" for e in ("", "_blank")]
        rows.append([SICK.get(name, "healthy"), *cells])
    return harness.Table("rewards signs", columns, rows)


def draw(names: Sequence[str], trial: Trial) -> None:
    """Exact answers to validation questions, prompts without signal and entropy, by update."""
    from matplotlib import rc_context

    from paddle_vl.train.reporting.plots import COLOURS, label_axes, new_figure

    panels = {"eval_exact_match": ("Exact answers, validation", "share"),
              "prompts/without_signal": ("Prompts without signal", "share"),
              "entropy": ("Entropy", "nats per token")}  # fmt: skip
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "grpo"}):
        figure = new_figure(13, 3.6)
        for axes, (key, (title, unit)) in zip(figure.subplots(1, 3), panels.items(), strict=True):
            for name, colour in zip(names, COLOURS, strict=False):
                lines = [x for x in trial.lines(name)[:UPDATES] if x.get(key) is not None]
                points = [(x["step"], x[key]) for x in lines]
                axes.plot(*zip(*points, strict=True) if points else ([], []), label=name,
                          color=colour)  # fmt: skip
            label_axes(axes, title, "update", unit)
        figure.axes[0].legend(frameon=False, fontsize=8)
        figure.savefig(PICTURE, metadata={"Date": None})


def learn(options: argparse.Namespace, _: Path) -> harness.Result:
    trial = Trial(options.output.resolve(), options.start.resolve())
    names = [name for seed in options.seeds for name in trial.seeded(seed)]
    first = options.seeds[0]
    names += trial.alone(first)
    trial.sick(first)
    found = {name: trial.exact(name, "measured") for name in ("start", *names, *SICK)}
    chosen = trial.chosen()
    tables = [
        harness.Table(
            "rewards choice",
            ["learning rate and settings", *QUESTIONS, "lost"],
            [
                [
                    name,
                    *("/".join(f"{of[task]:.1f}" for of in seeds) for task in QUESTIONS),
                    "/".join(f"{lost(chosen['start'][0], of):.1f}" for of in seeds),
                ]
                for name, seeds in chosen.items()
            ],
        ),
        learned_table(found, trial),
        signs_table([f"recipe{first}", *SICK], trial, found),
    ]
    if options.write_doc is not None:
        draw([*(f"{kind}{first}" for kind in KINDS), *SICK], trial)
    problems = missed(found)
    print(*problems, sep="\n", file=sys.stderr)
    return harness.Result(tables, {"choice": chosen, **found}, is_good=not problems)


def main() -> int:
    made = harness.parser(__doc__)
    made.add_argument("output", type=Path, help="folder for data, runs and figures")
    made.add_argument("--start", type=Path, required=True, help="the quickstart's model folder")
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    return harness.run(made, learn)


if __name__ == "__main__":
    sys.exit(main())
