"""Tables of a report.

Guarantees: results, differing settings and origin of all runs, with a dash for unknown values;
settings without effect on training are not compared.
"""

import pytest

from paddle_vl.report.runs import read_runs
from paddle_vl.report.summary import shown_duration, shown_number, tables_of
from tests.single_card_tests.report.run_folders import LINES, SETTINGS, START, write_run


def tables(*folders) -> dict[str, dict[str, list[str]]]:
    return {table.title: dict(table.rows) for table in tables_of(read_runs(folders))}


def other_run(folder, **changes):
    train = SETTINGS["train"] | {"output_dir": "runs/two", "learning_rate": 0.1} | changes
    return write_run(folder, LINES[:1], {"model": SETTINGS["model"], "train": train}, starts=None)


def test_results_of_all_runs(tmp_path):
    found = tables(write_run(tmp_path / "a"), other_run(tmp_path / "b"))["Results"]
    assert found == {
        "last step": ["30 of 30", "10 of 30"],
        "last loss": ["2", "4"],
        "best evaluation loss": ["2.5 at step 25", "-"],
        "last evaluation loss": ["3", "-"],
        "mean per second": ["100 tokens", "90 tokens"],
        "skipped updates": ["10", "0"],
        "duration": ["1 h 05 min", "-"],
    }


def test_settings_that_differ(tmp_path):
    found = tables(write_run(tmp_path / "a"), other_run(tmp_path / "b", extra=[1]))
    assert found["Settings that differ"] == {
        "train.learning_rate": ["0.002", "0.1"],
        "train.extra": ["not set", "[1]"],
    }
    assert found["All settings"]["model.freeze"] == ['["vision"]', '["vision"]']


def test_runs_of_the_same_settings_say_so(tmp_path):
    one = write_run(tmp_path / "a")
    other = other_run(tmp_path / "b", learning_rate=0.002)
    differing = tables_of(read_runs([one, other]))[1]
    assert (differing.rows, differing.note[:26]) == ([], "All settings are the same,")
    missing = write_run(tmp_path / "c", settings=None)
    assert "No config.yaml: c." in tables_of(read_runs([one, other, missing]))[1].note


def test_origin_is_that_of_the_newest_start(tmp_path):
    resumed = START | {
        "started": "2026-11-22T10:00:00+00:00", "ended": None, "first_step": 20,
        "git": {"revision": "fedcba9876543210", "is_dirty": False}, "host": "second",
        "command": ["paddle-vl", "train", "a.yaml", "data.train=[a.jsonl, b c.jsonl]"],
    }  # fmt: skip
    found = tables(write_run(tmp_path / "a", starts=[START, resumed]))
    origin = found["Where the run comes from"]
    assert origin["started"] == ["2026-11-21T10:00:00+00:00"]
    assert origin["starts"] == ["2, resumed at step 20"]
    assert origin["git revision"] == ["fedcba9876"]
    assert origin["processes"] == ["4 (dp 2, mp 2)"]
    assert origin["command"] == ["paddle-vl train a.yaml 'data.train=[a.jsonl, b c.jsonl]'"]
    assert (origin["host"], origin["numpy"]) == (["second"], ["2.0.0"])
    assert "git revision of paddle-vl" not in origin
    # The start of the run without a resume has uncommitted changes.
    origin = tables(write_run(tmp_path / "b"))["Where the run comes from"]
    assert origin["git revision"] == ["0123456789 with uncommitted changes"]
    assert found["Results"]["duration"] == ["1 h 05 min, and 1 start without an end"]


@pytest.mark.parametrize(
    ("shown", "value", "text"),
    [
        *((shown_duration, seconds, text) for seconds, text in (
            (7, "7 s"), (61, "1 min 01 s"), (3725, "1 h 02 min"), (90000, "1 d 01 h"),
        )),
        *((shown_number, value, text) for value, text in (
            (3, "3"), (1234567, "1,234,567"), (0.123456, "0.1235"), (1e-9, "1e-09"),
        )),
    ],
)  # fmt: skip
def test_durations_and_numbers(shown, value, text):
    assert shown(value) == text
