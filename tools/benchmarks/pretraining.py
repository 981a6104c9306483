r"""What pretraining is worth: held-out loss per source, and steps of fine-tuning that it saves.

    python tools/benchmarks/pretraining.py --write-doc docs/pretraining.md \
        --plot docs/images/pretraining.png

For every seed: a small Qwen3-VL is pretrained from random weights on the digits corpus
(`configs/quickstart/digits_pretraining.yaml`), then fine-tuned on questions about digits
(`configs/quickstart/digits_answers.yaml`), once from the pretrained model and once from the random
weights that pretraining began with; everything else is equal. Greedy answers to questions about
images that no run trained on are counted after every few steps. A seed's results are kept in
`--work`, so that an interrupted measurement goes on.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, Table, overrides, parser, show
from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.config.load import load_run_config
from paddle_vl.families.qwen3_vl.evaluation import greedy_answers
from paddle_vl.families.qwen3_vl.inputs.dataset import MessagesDataset
from paddle_vl.families.qwen3_vl.inputs.processor import Qwen3VLProcessor
from paddle_vl.train.build import build_trainer
from paddle_vl.train.reporting.run_files import METRICS_FILE, MetricsFile
from paddle_vl.train.trainer import Trainer

CONFIGS = ROOT / "configs" / "quickstart"
STARTS = ("pretrained", "random")
SOURCES = ("captions", "pages", "text")
# A digit and an end.
_ANSWER_TOKENS, _BATCH = 2, 150
Found = dict[str, Any]


def pretrained(corpus: Path, work: Path, seed: int, changes: Sequence[str]) -> Found:
    """Pretrain; returns the held-out losses by source at 0 tokens and at every evaluation."""
    output = work / f"pretraining_{seed}"
    settings = {"train.seed": seed, "train.output_dir": output, "logging.progress_bar": "false"}
    trainer = _trainer("digits_pretraining.yaml", corpus, settings, changes)
    assert trainer.evaluate is not None
    first = trainer.evaluate(lambda: None)
    assert first is not None
    tokens = [0]
    losses = {name: [each.loss] for name, each in first.by_source.items()}
    trainer.run()
    for line in MetricsFile(output / METRICS_FILE).read():
        if "eval_loss" in line:
            tokens.append(line["tokens"])
            for name, values in losses.items():
                values.append(line[f"eval_loss/{name}"])
    return {"tokens": tokens, "losses": losses, "model": str(output / "final")}


def fine_tuned(
    corpus: Path, work: Path, seed: int, start: str, model: Path, changes: Sequence[str]
) -> Found:
    """Fine-tune; returns the steps of measurement and the share of right answers at each."""
    settings = {
        "train.seed": seed,
        "train.output_dir": work / f"answers_{start}_{seed}",
        "logging.progress_bar": "false",
        "data.processor": corpus / "processor",
        "model.pretrained": model,
    }
    if start == "random":
        fresh = load_run_config(CONFIGS / "digits_pretraining.yaml").model.config
        settings |= {"model.pretrained": "null", "model.config": json.dumps(fresh)}
    trainer = _trainer("digits_answers.yaml", corpus, settings, changes)
    processor = Qwen3VLProcessor.from_pretrained(corpus / "processor")
    questions = MessagesDataset([str(corpus / "held_out_answers.jsonl")], processor, 64)
    steps: list[int] = []
    shares: list[float] = []
    evaluate = trainer.evaluate
    assert evaluate is not None

    def measured(received: Callable[[], int | None]) -> Any:
        model = trainer.runner.model
        model.eval()
        answers = greedy_answers(
            model, processor, questions, batch_size=_BATCH, max_new_tokens=_ANSWER_TOKENS
        )
        model.train()
        steps.append(trainer.step)
        shares.append(sum(answer.is_exact for answer in answers) / len(answers))
        return evaluate(received)

    trainer.evaluate = measured
    measured(lambda: None)
    trainer.run()
    return {"steps": steps, "right": shares}


def _trainer(
    config: str, corpus: Path, settings: Mapping[str, Any], changes: Sequence[str]
) -> Trainer:
    """The trainer of a configuration whose corpus lies in another folder."""
    text = (CONFIGS / config).read_text(encoding="utf-8")
    copy = Path(settings["train.output_dir"]).parent / f"{config}.{settings['train.seed']}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text.replace("runs/digits_corpus", str(corpus)), encoding="utf-8")
    return build_trainer(load_run_config(copy, [*overrides(settings), *changes]))


def steps_to(found: Found, share: float) -> int | None:
    """The first measured step with so many right answers; None if there is none."""
    pairs = zip(found["steps"], found["right"], strict=True)
    return next((step for step, right in pairs if right >= share), None)


def measured_seed(seed: int, options: Any) -> Found:
    """All runs of a seed, or their results from an earlier call."""
    kept = options.work / f"seed_{seed}.json"
    if kept.exists():
        return json.loads(kept.read_text(encoding="utf-8"))
    begin = time.perf_counter()
    found: Found = {
        "pretraining": pretrained(options.corpus, options.work, seed, options.pretraining)
    }
    model = Path(found["pretraining"].pop("model"))
    for start in STARTS:
        found[start] = fine_tuned(
            options.corpus, options.work, seed, start, model, options.fine_tuning
        )
    found["minutes"] = (time.perf_counter() - begin) / 60
    kept.write_text(json.dumps(found), encoding="utf-8")
    return found


def loss_table(runs: Sequence[Found]) -> Table:
    rows = []
    for name in SOURCES:
        curves = [run["pretraining"]["losses"][name] for run in runs]
        ends = (spread_of([curve[at] for curve in curves], ".2f") for at in (0, -1))
        rows.append([name, *ends])
    tokens = runs[0]["pretraining"]["tokens"][-1]
    return Table(
        "pretraining_loss",
        ["source", "random weights", "pretrained"],
        rows,
        f"Held-out loss per token before and after {tokens:,} tokens: median over "
        f"{len(runs)} seeds (lowest to highest).",
    )


def steps_table(runs: Sequence[Found], shares: Sequence[float]) -> Table:
    rows = []
    for share in shares:
        cells = []
        for start in STARTS:
            steps = [steps_to(run[start], share) for run in runs]
            known = [step for step in steps if step is not None]
            missing = f", {len(steps) - len(known)} never" if len(known) < len(steps) else ""
            cells.append((spread_of(known, "g") if known else "-") + missing)
        rows.append([f"{share:.0%}", *cells])
    last = runs[0]["random"]["steps"][-1]
    minutes = sum(run["minutes"] for run in runs)
    return Table(
        "pretraining_steps",
        ["right answers", *STARTS],
        rows,
        f"Steps of fine-tuning until so many of 300 held-out questions are answered right, of at "
        f"most {last}: median over {len(runs)} seeds (lowest to highest). All runs together took "
        f"{minutes:.0f} minutes.",
    )


def spread_of(values: Sequence[float], form: str) -> str:
    """`median (lowest to highest)`."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def draw(runs: Sequence[Found], file: Path) -> None:
    """Held-out losses over tokens, and right answers over steps: a line per seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for number, run in enumerate(runs):
        for colour, name in enumerate(SOURCES):
            label = name if number == 0 else None
            found = run["pretraining"]
            left.plot(found["tokens"], found["losses"][name], f"C{colour}.-", label=label)
        for colour, start in enumerate(STARTS, start=len(SOURCES)):
            label = f"from {start} weights" if number == 0 else None
            shares = [100 * share for share in run[start]["right"]]
            right.plot(run[start]["steps"], shares, f"C{colour}.-", label=label)
    left.set(xlabel="tokens of pretraining", ylabel="held-out loss per token", yscale="log")
    right.set(xlabel="steps of fine-tuning", ylabel="right answers, %", ylim=(0, 100))
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    options_of.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "pretraining_benchmark", metavar="DIR",
        help="folder for the runs and their results (default: runs/pretraining_benchmark)",
    )  # fmt: skip
    options_of.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves into a PNG")
    for name in ("pretraining", "fine-tuning"):
        options_of.add_argument(
            f"--{name}", nargs="*", default=[], metavar="KEY=VALUE", help=f"settings of {name}"
        )
    options = options_of.parse_args()
    configure_cpu_runtime()
    options.work = options.work.resolve()
    options.corpus = options.work / "corpus"
    tool = str(ROOT / "tools" / "make_digits_corpus.py")
    subprocess.run([sys.executable, tool, str(options.corpus)], check=True)
    runs = [measured_seed(seed, options) for seed in range(options.seeds)]
    show(options, [loss_table(runs), steps_table(runs, (0.5, 0.8, 0.9))], runs)
    if options.plot is not None:
        draw(runs, options.plot)


if __name__ == "__main__":
    main()
