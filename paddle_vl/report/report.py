"""A report: read the runs, write the page and its pictures."""

from collections.abc import Sequence
from pathlib import Path

from paddle_vl.files.named_errors import write_text
from paddle_vl.report.page import page
from paddle_vl.report.panels import panels_of
from paddle_vl.report.pictures import draw_panels
from paddle_vl.report.runs import read_runs
from paddle_vl.report.summary import tables_of

PAGE_FILE = "report.html"


def write_report(
    folders: Sequence[str | Path], output_dir: Path, *, with_pictures: bool = True
) -> list[Path]:
    """Write report.html, and a PNG for each of its panels, into `output_dir`.

    Args:
        folders: of the runs, their train.output_dir.

    Returns:
        The files, the page first.

    Raises:
        ValueError, RuntimeError: see `paddle_vl.report.runs.read_runs`; no matplotlib for the
            pictures, the page is there then.
    """
    runs = read_runs(folders)
    panels = panels_of(runs)
    output_dir.mkdir(parents=True, exist_ok=True)
    file = output_dir / PAGE_FILE
    text = page(runs, panels, tables_of(runs))
    # Names may hold what no text file can: halves of characters.
    write_text(file, text.encode("utf-8", "backslashreplace").decode("utf-8"))
    return [file, *(draw_panels(runs, panels, output_dir) if with_pictures else [])]
