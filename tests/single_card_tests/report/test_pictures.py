"""Panels as PNG files.

Guarantees: lines have the numbers and gaps of the series; skipped updates and resumed steps are
marked; a loss has a logarithmic axis with plain numbers; curves of several runs are labelled by
run, next to the axes if there are many.
"""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from paddle_vl.report.panels import panels_of
from paddle_vl.report.pictures import draw_panel
from paddle_vl.report.runs import read_runs
from tests.single_card_tests.report.run_folders import LINES, START, write_run


def drawn(name: str, *folders) -> Axes:
    runs = read_runs(folders)
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    (panel,) = [panel for panel in panels_of(runs) if panel.name == name]
    draw_panel(axes, runs, panel)
    return axes


def line_of(axes: Axes, label: str) -> np.ndarray:
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return np.array(line.get_data())


def test_lines_have_the_numbers_their_gaps_and_marks(tmp_path):
    """Marks of updates that were skipped and of steps where it was resumed."""
    starts = [START, START | {"first_step": 20}]
    axes = drawn("loss", write_run(tmp_path / "a", starts=starts))
    marks = [tuple(line.get_xdata()) for line in axes.lines if line.get_label().startswith("_")]
    assert marks == [(20, 20), (10, 20), (20,)]
    np.testing.assert_array_equal(line_of(axes, "training"), [[10, 20, 30], [4, np.nan, 2]])
    np.testing.assert_array_equal(line_of(axes, "evaluation"), [[25, 30], [2.5, 3]])


def test_axes_have_units_and_a_loss_plain_numbers(tmp_path):
    axes = drawn("loss", write_run(tmp_path / "a"))
    axes.figure.canvas.draw()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "nats per target token")
    assert axes.get_yscale() == "log"
    texts = [label.get_text() for label in axes.get_yticklabels(which="both")]
    assert {"2", "3"} <= set(texts)
    assert drawn("epoch", tmp_path / "a").get_yscale() == "linear"


@pytest.mark.parametrize(("number", "is_inside"), [(2, True), (3, False)])
def test_curves_of_several_runs_are_named(tmp_path, number, is_inside):
    names = ["a", "b", "c"][:number]
    axes = drawn("loss", *(write_run(tmp_path / name, LINES) for name in names))
    axes.figure.canvas.draw()
    legend = axes.get_legend()
    expected = [f"{name}, {kind}" for kind in ("training", "evaluation") for name in names]
    assert [text.get_text() for text in legend.get_texts()] == expected
    assert (legend.get_window_extent().x0 < axes.get_window_extent().x1) == is_inside
