"""Predicted and true chunks of a policy's last evaluation, as small drawings of a report."""

from collections.abc import Sequence

from paddle_vl.files.text_file import read_json_object
from paddle_vl.report.html import fold, table
from paddle_vl.report.runs import Run
from paddle_vl.report.summary import shown_number
from paddle_vl.train.reporting.plots import COLOURS
from paddle_vl.train.reporting.run_files import ACTIONS_FILE

_WIDTH, _HEIGHT = 160, 80
_NOTE = "Predicted (coloured) and true (grey) values over the steps of a chunk, in the data's units"


def actions_section(runs: Sequence[Run]) -> str:
    """For each run that has such chunks a table with a row per sample and a drawing per dim.

    Raises:
        RuntimeError: a run's file is damaged.
    """
    return "".join(_of_run(run) for run in runs if (run.folder / ACTIONS_FILE).is_file())


def _of_run(run: Run) -> str:
    file, rows = run.folder / ACTIONS_FILE, []
    values = read_json_object(file, "what a run writes")
    try:
        title = f"Actions at step {values['step']:,}, first samples of data.eval: {run.name}"
        for chunk in values["chunks"]:
            dims = (zip(*chunk[name], strict=True) for name in ("predicted", "true"))
            rows.append((chunk["dataset"], [_drawing(*each) for each in zip(*dims, strict=True)]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RuntimeError(f"{file} is not what a run writes ({error!r}); move it away") from error
    return fold(title, f"<p class='note'>{_NOTE}</p>{table(rows)}", is_open=False)


def _drawing(predicted: Sequence[float], true: Sequence[float]) -> str:
    low, high = min(*predicted, *true), max(*predicted, *true)
    across, up = _WIDTH / max(len(true) - 1, 1), _HEIGHT / ((high - low) or 1.0)
    lines = ""
    for curve, colour in ((true, "#888"), (predicted, COLOURS[0])):
        points = " ".join(f"{i * across:.1f},{(high - y) * up:.1f}" for i, y in enumerate(curve))
        lines += f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
    box = f'viewBox="-2 -2 {_WIDTH + 4} {_HEIGHT + 4}" width="{_WIDTH}" height="{_HEIGHT}"'
    return f"<svg {box}>{lines}</svg><br>{shown_number(low)} to {shown_number(high)}"
