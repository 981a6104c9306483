"""Metrics lines as series.

Guarantees: every metric has all its numbers at their steps, and null where one was not finite;
skipped updates are placed between the lines where their count grew.
"""

from paddle_vl.report.runs import Series, SkippedUpdates, series_of, skipped_updates
from tests.single_card_tests.report.run_folders import LINES


def test_every_number_of_every_key_is_there():
    series = series_of(LINES)
    assert [*series] == [
        "loss", "grad_norm", "learning_rate", "epoch", "learning_rate/mergers",
        "tokens_per_second", "skipped_updates", "target_tokens", "eval_loss",
        "quite_new/a_min", "quite_new/a_max",
    ]  # fmt: skip
    assert series["loss"] == Series([10, 20, 30], [4.0, None, 2.0])
    assert series["eval_loss"] == Series([25, 30], [2.5, 3.0])
    assert series["quite_new/a_max"] == Series([30], [3])


def test_a_key_without_any_number_is_no_series():
    assert series_of([{"step": 1, "loss": None, "text": "a"}]) == {}


def test_lines_in_disorder_are_put_in_order():
    lines = [{"step": step, "loss": float(step)} for step in (3, 1, 2)]
    assert series_of(lines)["loss"].steps == [1, 2, 3]


def test_skipped_updates_are_between_two_lines():
    counts = {10: 2, 20: 2, 30: 5, 40: 1}
    lines = [{"step": step, "skipped_updates": count} for step, count in counts.items()]
    found = skipped_updates(series_of(lines))
    assert found == [SkippedUpdates(0, 10, 2), SkippedUpdates(20, 30, 3)]
    assert skipped_updates({}) == []
