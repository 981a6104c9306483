"""Draw the package: its boxes, and the path of one batch.

    python tools/draw_architecture.py            write them into docs/architecture.md
    python tools/draw_architecture.py --check    exit with 1 if the page is not up to date

The boxes of `BOXES` are groups of folders. Arrows are import statements: an arrow from A to B means
that a file of A imports one of B; arrows that follow from others are left out. An import against
the order of the boxes is a dotted arrow. The path is that with kernels in C, so without a C
compiler it is neither written nor compared.
"""

import argparse
import ast
import contextlib
import json
import logging
import re
import sys
import tempfile
from pathlib import Path

from batch_trace import PACKAGE, Trace, TracedLoad
from paddle_vl.config.load import load_run_config
from paddle_vl.nn.cpu import compiled
from paddle_vl.train.build import build_trainer
from signalled_runs import write_tiny_run

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
# The boxes from top to bottom, and the folders of the package in each.
BOXES = {
    "commands and add-ons": (
        "cli doctor export integrations profile report serving simulation testing"
    ),
    "training": "train",
    "model families": "families generation",
    "parallelism": "parallel",
    "data and files": "checkpoint config data files",
    "layers and batches": "batch nn",
}
# The table has each of its folders in a row of its own.
_SPLIT = "families"


# In every line of the tiny run's data.
TEXT = "Which colour?"


def box_of(folder: str) -> str:
    """The box of a folder of the package.

    Raises:
        ValueError: no box names it.
    """
    for box, folders in BOXES.items():
        if folder in folders.split():
            return box
    raise ValueError(f"paddle_vl/{folder} is in no box: add it to BOXES of {Path(__file__).name}")


def folders() -> list[str]:
    """Names of the package's folders."""
    return sorted(file.parent.name for file in PACKAGE.glob("*/__init__.py"))


def imports() -> dict[str, set[str]]:
    """The boxes that each box imports."""
    known = folders()
    found: dict[str, set[str]] = {box: set() for box in BOXES}
    for file in sorted(PACKAGE.glob("*/**/*.py")):
        own = box_of(file.relative_to(PACKAGE).parts[0])
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                top, _, rest = name.partition(".")
                folder = rest.partition(".")[0]
                if top == "paddle_vl" and folder in known:
                    found[own].add(box_of(folder))
        found[own].discard(own)
    return found


def arrows() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The arrows between boxes: down, without those that a longer way implies; and up."""
    order = list(BOXES)
    graph = imports()
    down = {a: {b for b in graph[a] if order.index(b) > order.index(a)} for a in order}
    reached: dict[str, set[str]] = {}
    for box in reversed(order):
        reached[box] = down[box].union(*(reached[below] for below in down[box]))
    solid = [
        (a, b) for a in order for b in order
        if b in down[a] and not any(b in reached[other] for other in down[a])
    ]  # fmt: skip
    return solid, [(a, b) for a in order for b in order if b in graph[a] - down[a]]


def first_sentence(folder: str) -> str:
    """First sentence of a folder's docstring."""
    text = ast.get_docstring(
        ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))
    )
    return re.split(r"\n\n|(?<=\.)\s", text or "", maxsplit=1)[0].replace("\n", " ").rstrip(".")


def picture() -> str:
    """The Mermaid graph of the boxes, and a table of their folders."""
    known = folders()
    rows = ["| box | folder | what it is | files |", "| --- | --- | --- | --- |"]
    boxes = []
    for box, names in BOXES.items():
        inside = [name for name in names.split() if name in known]
        label = box
        boxes.append(f'    {_id(box)}["<b>{box}</b><br/>{" ".join(inside)}"]')
        for name in inside:
            nested = sorted(file.parent for file in (PACKAGE / name).glob("*/__init__.py"))
            nested = nested if name == _SPLIT else []
            for folder in (PACKAGE / name, *nested):
                files = [
                    file for file in folder.rglob("*.py")
                    if file.name != "__init__.py"
                    and not (folder.name == _SPLIT and file.parent != folder)
                ]  # fmt: skip
                part = folder.relative_to(PACKAGE).as_posix()
                rows.append(f"| {label} | `{part}` | {first_sentence(part)} | {len(files)} |")
                label = ""
    solid, up = arrows()
    lines = [f"    {_id(a)} --> {_id(b)}" for a, b in solid]
    lines += [f"    {_id(a)} -.-> {_id(b)}" for a, b in up]
    return "\n".join(["```mermaid", "graph TD", *boxes, *lines, "```", "", *rows])


def _id(box: str) -> str:
    return re.sub(r"\W", "_", box)


def passed_files(run: Path | None = None, text: str = TEXT) -> dict[str, str]:
    """The files that the batch of the second step of a run passes, in the order in which batches
    reach them, each with its first function; see `batch_trace`.

    A worker loads the batch, and this process trains: calls of both are traced, here those of the
    step until the parameters are updated.

    Args:
        run: its settings; None for a tiny run of Qwen3-VL.
        text: part of every text of its data.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = ["data.num_workers=1", "data.prefetch_batches=1", "logging.progress_bar=false"]
        config = load_run_config(run or write_tiny_run(Path(folder)), settings)
        trace, file = Trace(text, ends_after="train_step"), Path(folder) / "passed.json"
        trace.is_on = False
        # The loader's threads start with the trainer.
        with trace.entered():
            trainer = build_trainer(config, writes=False)
            data = trainer.feed._data
            data._load = TracedLoad(data._load, text, file)
            with contextlib.closing(trainer.feed):
                trainer.train_one_step()
                trace.is_on = True
                trainer.train_one_step()
        in_worker = json.loads(file.read_text(encoding="utf-8"))
    # What other threads bring is there before the main thread takes it.
    found = sorted(trace.first.items(), key=lambda entry: entry[1][0])
    ordered = dict(found) | in_worker
    return {name: ordered[name][1] for name in (in_worker | dict(found))}


def path() -> str:
    """Table of the files that a batch passes."""
    lines = ["| | file | where the batch enters it |", "| --- | --- | --- |"]
    for number, (name, function) in enumerate(passed_files().items(), 1):
        function = function.replace(".<locals>", "").replace("<listcomp>", "[...]")
        lines.append(f"| {number} | `{name}` | `{function}` |")
    return "\n".join(lines)


def written(page: str, name: str, text: str) -> str:
    """The page with the text between two markers replaced.

    Raises:
        ValueError: the page does not have the markers.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    head, found, rest = page.partition(begin)
    _, also_found, tail = rest.partition(end)
    if not (found and also_found):
        raise ValueError(f"{PAGE} has no {begin} ... {end}: put both on lines of their own")
    return f"{head}{begin}\n{text}\n{end}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, compare only")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    page = PAGE.read_text(encoding="utf-8")
    made = written(page, "picture", picture())
    if compiled.enable():
        made = written(made, "path", path())
    if not options.check:
        PAGE.write_text(made, encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    elif made != page:
        sys.exit(f"{PAGE.name} is out of date: run python tools/draw_architecture.py")


if __name__ == "__main__":
    main()
