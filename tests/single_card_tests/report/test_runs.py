"""Reading runs for a report.

Guarantees: a folder without a run is refused with a hint; so are a run given twice, runs without a
common metric, and a damaged file; an incomplete last line is left out and noted; runs with the same
folder name get different names; starts before the last one from step 0 are left out. Every metric
has all its numbers at their steps, and null where one was not finite; skipped updates are placed
between the lines where their count grew.
"""

import pytest

from paddle_vl.report.runs import Series, SkippedUpdates, read_runs, series_of, skipped_updates
from tests.single_card_tests.report.run_folders import LINES, START, write_run


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ("a b/../a", r"a is given 2 times"),
        ("other a", r"other has no metric in common .*it has score, they have lo"),
        ("absent", r"absent is not .* no such folder; give the train.outp"),
        ("empty", r"empty is not .* it has no metrics.jsonl; give the"),
        (".", r"it holds the runs \S+/a, \S+/null: give those"),
        ("null", r"metrics.jsonl has no number yet"),
    ],
)
def test_folders_without_a_run_are_refused_with_a_hint(tmp_path, folders, message):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "a")
    write_run(tmp_path / "null", [{"step": 1, "loss": None}])
    if "other" in folders:
        write_run(tmp_path / "other", [{"step": 1, "score": 2.0}])
    with pytest.raises((RuntimeError, ValueError), match=message):
        read_runs([tmp_path / folder for folder in folders.split()])


def test_torn_last_line_is_left_out_and_a_broken_one_refused(tmp_path):
    folder = write_run(tmp_path / "a")
    assert not read_runs([folder])[0].is_torn
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 40, "lo')
    (run,) = read_runs([folder])
    assert (run.is_torn, run.last_step) == (True, 30)
    file.write_text(file.read_text() + '\n{"step": 50}\n')
    with pytest.raises(RuntimeError, match=r"metrics.jsonl:5 is not a metrics line"):
        read_runs([folder])


def test_names_are_as_long_as_it_takes_to_tell_runs_apart(tmp_path):
    folders = [write_run(tmp_path / path) for path in ("a/run", "b/run", "b/other", "b/x_other")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run", "other", "x_other"]


def test_starts_of_metrics_that_were_dropped_do_not_count(tmp_path):
    resumed = START | {"first_step": 20, "ended": None}
    starts = [START | {"ended": "2026-11-21T10:00:10+00:00"}, resumed, START, resumed]
    (run,) = read_runs([write_run(tmp_path / "b", settings=None, starts=None)])
    assert (run.settings, run.starts, run.resumed_steps) == (None, [], [])
    (run,) = read_runs([write_run(tmp_path / "a", LINES, starts=starts)])
    assert run.starts == starts[2:]
    assert run.resumed_steps == [20]
    assert run.seconds == 65 * 60


def test_every_number_of_every_key_is_there():
    series = series_of([{"step": 1, "text": None, "word": "a"}, *reversed(LINES)])
    assert [*series] == [
        "loss", "grad_norm", "learning_rate", "epoch", "learning_rate/mergers",
        "tokens_per_second", "skipped_updates", "target_tokens", "eval_loss",
        "quite_new/a_min", "quite_new/a_max",
    ]  # fmt: skip
    assert series["loss"] == Series([10, 20, 30], [4.0, None, 2.0])
    assert series["eval_loss"] == Series([25, 30], [2.5, 3.0])
    assert series["quite_new/a_max"] == Series([30], [3])


def test_skipped_updates_are_between_two_lines():
    counts = {10: 2, 20: 2, 30: 5, 40: 1}
    lines = [{"step": step, "skipped_updates": count} for step, count in counts.items()]
    found = skipped_updates(series_of(lines))
    assert found == [SkippedUpdates(0, 10, 2), SkippedUpdates(20, 30, 3)]
    assert skipped_updates({}) == []
