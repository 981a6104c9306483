"""Progress of a run on the terminal, or as lines where there is no bar."""

import io
import logging
import re
import sys

import pytest

from paddle_vl.train.reporting import reporter
from paddle_vl.train.reporting.reporter import ProgressBar

LINE = {"step": 2, "loss": 0.1234, "learning_rate": 1e-3, "tokens_per_second": 4321.0}


class Screen(io.StringIO):
    """Visible lines of a terminal; a carriage return overwrites the current line."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        shown = []
        for line in self.getvalue().split("\n"):
            cells: list[str] = []
            for part in line.split("\r"):
                cells[: len(part)] = part
            shown.append("".join(cells).rstrip())
        return shown


def on_screen(monkeypatch) -> Screen:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    # Drawn at every step, with a fixed width.
    monkeypatch.setattr(reporter, "_DRAW_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "120")
    return screen


@pytest.fixture
def told(monkeypatch, caplog):
    """Log lines of progress, caught only by the test's handler."""
    monkeypatch.setattr(reporter.logger, "propagate", False)
    reporter.logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, reporter.logger.name):
        yield caplog
    reporter.logger.removeHandler(caplog.handler)


def in_pipe(monkeypatch) -> io.StringIO:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    return pipe


POLICY = {"step": 1, "loss": None, "samples_per_second": 3.14159}


@pytest.mark.parametrize(
    ("begin", "lines", "shown"),
    [
        (
            0, [LINE, {"step": 3, "eval_loss": 0.5}],
            r" 10%\|.*\| 1/10 .*loss 0.1234, eval 0.5000, lr 1.00e-03, 4321 tokens/s\]",
        ),
        # A resumed run goes on where it was; policies tell samples, and no skipped loss.
        (5, [POLICY], r" 60%\|.*\| 6/10 .*steps/s, 3.14 samples/s\]"),
    ],
)  # fmt: skip
def test_terminal_has_one_line_that_says_what_the_metrics_do(monkeypatch, begin, lines, shown):
    screen = on_screen(monkeypatch)
    bar = ProgressBar(10, begin, True)
    for line in lines:
        bar.show(line)
    bar.advance()
    (found,) = screen.lines
    assert re.fullmatch(f"train: {shown}", found), found
    bar.close()


@pytest.mark.parametrize(("open_stream", "has_bar"), [(in_pipe, True), (on_screen, False)])
def test_every_report_is_a_whole_line_where_there_is_no_bar(
    open_stream, has_bar, monkeypatch, told
):
    stream = open_stream(monkeypatch)
    seconds = 0.0
    bar = ProgressBar(100, 20, True, has_bar, clock=lambda: seconds)
    for step in (40, 60):
        for _ in range(20):
            seconds += 1.5
            bar.advance()
        bar.show({**LINE, "step": step})
        bar.show({"step": step, "eval_loss": 0.5})
    bar.close()
    assert told.messages == [
        "step 40 of 100, loss 0.1234, lr 1.00e-03, 4321 tokens/s, 01:30 left",
        "step 60 of 100, loss 0.1234, eval 0.5000, lr 1.00e-03, 4321 tokens/s, 01:00 left",
    ]
    assert stream.getvalue() == ""


@pytest.mark.parametrize("open_stream", [on_screen, in_pipe])
def test_other_processes_show_nothing(open_stream, monkeypatch, told):
    stream = open_stream(monkeypatch)
    bar = ProgressBar(10, 0, False, clock=lambda: 1e9)
    bar.show(LINE)
    bar.advance()
    bar.close()
    assert stream.getvalue() == ""
    assert told.messages == []
