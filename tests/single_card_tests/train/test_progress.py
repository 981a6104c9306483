"""Progress of a run on the terminal.

Guarantees: a terminal has one bar with the values of the last metrics line and evaluation; log
messages are printed above it; a file, a pipe or a terminal without a
bar has one line per report with the remaining time; ranks other than 0 print nothing.
"""

import io
import logging
import re
import sys

import pytest
from tqdm.contrib.logging import logging_redirect_tqdm

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


def test_terminal_has_one_line_that_says_what_the_metrics_do(monkeypatch):
    screen = on_screen(monkeypatch)
    bar = ProgressBar(10, 0, True)
    bar.show(LINE)
    bar.show({"step": 3, "eval_loss": 0.5})
    bar.advance()
    (line,) = screen.lines
    assert re.match(r"train:  10%\|.*\| 1/10 ", line)
    assert line.endswith("loss 0.1234, eval 0.5000, lr 1.00e-03, 4321 tokens/s]")
    bar.close()


def test_resumed_run_goes_on_where_it_was(monkeypatch):
    screen = on_screen(monkeypatch)
    ProgressBar(10, 5, True).close()
    assert re.match(r"train:  50%\|.*\| 5/10 ", screen.lines[0])


def test_log_message_stands_whole_above_the_bar(monkeypatch):
    screen = on_screen(monkeypatch)
    logger = logging.getLogger("told while a bar is shown")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(screen))
    bar = ProgressBar(10, 0, True)
    with logging_redirect_tqdm([logger]):
        bar.advance()
        logger.info("step 1: said")
        bar.advance()
    message, line = screen.lines
    assert message == "step 1: said"
    assert line.startswith("train:")
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


def test_policies_tell_samples_and_a_skipped_loss_is_left_out(monkeypatch):
    screen = on_screen(monkeypatch)
    bar = ProgressBar(10, 0, True)
    bar.show({"step": 1, "loss": None, "samples_per_second": 3.14159})
    bar.advance()
    bar.close()
    assert screen.lines[0].endswith("steps/s, 3.14 samples/s]")


@pytest.mark.parametrize("open_stream", [on_screen, in_pipe])
def test_other_processes_show_nothing(open_stream, monkeypatch, told):
    stream = open_stream(monkeypatch)
    bar = ProgressBar(10, 0, False, clock=lambda: 1e9)
    bar.show(LINE)
    bar.advance()
    bar.close()
    assert stream.getvalue() == ""
    assert told.messages == []
