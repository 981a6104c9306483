"""Answers of a run's model beside the expected ones, with their pictures.

A run with train.eval writes them, and `paddle-vl evaluate --predictions RUN/predictions.jsonl`.
"""

import json
from html import escape
from pathlib import Path
from typing import Any

from paddle_vl.report.html import fold, picture
from paddle_vl.train.reporting.answer_pictures import drawn, evenly
from paddle_vl.train.reporting.run_files import PREDICTIONS_FILE

_SHOWN = 24
_NEWLINE, _BREAK = "\n", "<br>"
_KEYS = ("sample", "prompt", "expected", "answer", "is_exact")


def read_predictions(folder: Path, name: str = PREDICTIONS_FILE) -> list[dict[str, Any]]:
    """The lines of a run's file of answers; empty without the file.

    Raises:
        RuntimeError: a line is not what `evaluate` writes.
    """
    file = folder / name
    if not file.is_file():
        return []
    lines = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not line.keys() >= {*_KEYS}:
            raise RuntimeError(
                f"{file}:{number} is not a prediction of paddle-vl evaluate: write the file again, "
                "or move it away"
            )
        lines.append(line)
    return lines


def predictions_section(name: str, predictions: list[dict[str, Any]]) -> str:
    """A foldable part of the page; up to 24 answers, evenly chosen over the file."""
    if not predictions:
        return ""
    right = sum(line["is_exact"] is True for line in predictions)
    shown = evenly(predictions, _SHOWN)
    title = f"Predictions of {name}: {right} of {len(predictions)} exact, {len(shown)} shown"
    articles = "".join(map(_article, shown))
    return fold(title, articles)


def rollouts_section(name: str, groups: list[dict[str, Any]]) -> str:
    """A foldable part of the page: groups of sampled answers, each behind its reward."""
    if not groups:
        return ""
    return fold(f"Sampled answers of {name}, with rewards", "".join(map(_article, groups)))


def _article(line: dict[str, Any]) -> str:
    pictures = "".join(_picture(source, line) for source in line.get("images", ()))
    rows = "".join(
        f"<p><b>{key}</b> {escape(str(line[key])).replace(_NEWLINE, _BREAK)}</p>"
        for key in ("prompt", "expected", "answer")
    )
    kind = "right" if line["is_exact"] is True else "wrong"
    return (
        f'<article class="{kind}"><p class="note">{escape(str(line["sample"]))}</p>'
        f"{pictures}{rows}</article>"
    )


def _picture(source: str, line: dict[str, Any]) -> str:
    """A small picture within the page, or why there is none."""
    try:
        return picture(drawn(source, line), "jpeg")
    except ValueError as error:
        return f'<p class="note">{escape(str(error))}</p>'
