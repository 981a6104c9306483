"""Predicted and true chunks of a policy's last evaluation, as small drawings of a report."""

from collections.abc import Sequence
from html import escape

from pydantic import BaseModel, ValidationError

from paddle_vl.files.text_file import read_json_object
from paddle_vl.report.runs import Run
from paddle_vl.report.summary import shown_number
from paddle_vl.train.reporting.run_files import ACTIONS_FILE

_WIDTH, _HEIGHT = 160, 80


class _Chunk(BaseModel):
    dataset: str
    predicted: list[list[float]]
    true: list[list[float]]


class _Actions(BaseModel):
    step: int
    chunks: list[_Chunk]


def actions_section(runs: Sequence[Run]) -> str:
    """A folded section of each run that has such chunks: a row per sample, a drawing per dim.

    Raises:
        RuntimeError: a run's file is damaged.
    """
    return "".join(_of_run(run) for run in runs if (run.folder / ACTIONS_FILE).is_file())


def _of_run(run: Run) -> str:
    file = run.folder / ACTIONS_FILE
    try:
        actions = _Actions.model_validate(read_json_object(file, "what a run writes"))
    except ValidationError as error:
        raise RuntimeError(f"{file} is not what a run writes; move it away ({error})") from error
    rows = "".join(
        f"<tr><th scope='row'>{escape(chunk.dataset)}</th>"
        + "".join(
            f"<td>{_drawing(*curves)}</td>"
            for curves in zip(
                zip(*chunk.predicted, strict=True), zip(*chunk.true, strict=True), strict=True
            )
        )
        + "</tr>\n"
        for chunk in actions.chunks
    )
    widest = max((len(chunk.true[0]) for chunk in actions.chunks), default=0)
    head = "".join(f"<th scope='col'>dim {dim}</th>" for dim in range(widest))
    title = f"Actions of the first samples of data.eval at step {actions.step:,}: {run.name}"
    note = (
        "Predicted (coloured) and true (grey) values over the steps of a chunk, in the data's units"
    )
    return (
        f"<details><summary>{escape(title)}</summary><p class='note'>{note}</p><div class='scroll'>"
        f"<table><thead><tr><td></td>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>"
        "</details>\n"
    )


def _drawing(predicted: Sequence[float], true: Sequence[float]) -> str:
    values = [*predicted, *true]
    low, high = min(values), max(values)
    scale = _HEIGHT / ((high - low) or 1.0)
    step = _WIDTH / max(len(true) - 1, 1)

    def line(curve: Sequence[float], colour: str) -> str:
        points = (f"{i * step:.1f},{(high - y) * scale:.1f}" for i, y in enumerate(curve))
        look = f'fill="none" stroke="{colour}" stroke-width="2"'
        return f'<polyline points="{" ".join(points)}" {look}/>'

    label = f"{shown_number(low)} to {shown_number(high)}"
    return (
        f'<svg viewBox="-2 -2 {_WIDTH + 4} {_HEIGHT + 4}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{label}">{line(true, "#888")}{line(predicted, "var(--c0)")}</svg>'
        f"<br>{label}"
    )
