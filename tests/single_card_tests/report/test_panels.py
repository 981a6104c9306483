"""Panels of a report.

Guarantees: every metric of every run, known or not, is in exactly one panel; evaluations,
components and statistics share the panel of their metric; a run without a metric is left out of its
panel; panel names are unique file names; a loss starts with a logarithmic axis if all values are
positive.
"""

from collections import Counter

import pytest

from paddle_vl.report.panels import Panel, panels_of
from paddle_vl.report.runs import Run, read_runs
from tests.single_card_tests.report.run_folders import LINES, without, write_run


def panels(tmp_path, *lines_of_runs) -> tuple[list[Run], dict[str, Panel]]:
    folders = [write_run(tmp_path / f"run{i}", lines) for i, lines in enumerate(lines_of_runs)]
    runs = read_runs(folders)
    return runs, {panel.name: panel for panel in panels_of(runs)}


def test_every_key_of_every_run_is_in_one_panel(tmp_path):
    runs, found = panels(tmp_path, LINES, without("grad_norm"))
    drawn = Counter((curve.run, curve.key) for one in found.values() for curve in one.curves)
    expected = {(i, key) for i, run in enumerate(runs) for key in run.series}
    assert drawn == Counter(expected)
    assert [curve.run for curve in found["grad_norm"].curves] == [0]


def test_what_belongs_together_shares_a_panel(tmp_path):
    line = {
        "step": 1, "loss": 1.0, "eval_loss": 1.0, "MSE": 0.5, "CE": 0.5, "eval_CE": 0.5,
        "learning_rate": 1.0, "learning_rate/model.visual.*": 1.0, "memory_gb": 2.0,
        "memory_gb_max": 3.0, "tokens_per_expert_min": 1, "tokens_per_expert_max": 2,
    }  # fmt: skip
    _, found = panels(tmp_path, [line])
    assert {name: panel.keys for name, panel in found.items()} == {
        "loss": ["loss", "eval_loss"],
        "MSE": ["MSE"],
        "CE": ["CE", "eval_CE"],
        "learning_rate": ["learning_rate", "learning_rate/model.visual.*"],
        "memory_gb": ["memory_gb", "memory_gb_max"],
        "tokens_per_expert": ["tokens_per_expert_min", "tokens_per_expert_max"],
    }
    assert [curve.label for curve in found["loss"].curves] == ["training", "evaluation"]
    assert [curve.label for curve in found["learning_rate"].curves] == ["", "model.visual.*"]
    assert [curve.look for curve in found["tokens_per_expert"].curves] == [0, 0]
    assert [curve.look for curve in found["learning_rate"].curves] == [0, 1]


@pytest.mark.parametrize(
    ("key", "section", "title", "unit"),
    [
        ("loss", "Loss", "Loss", "nats per target token"),
        ("CE", "Loss", "CE", "mean, before its weight"),
        ("eval_accuracy", "Loss", "Accuracy", "accuracy"),
        ("grad_norm", "Learning rate and gradient", "Gradient norm", "global norm before clipping"),
        ("tokens_per_second", "Speed and memory", "Tokens per second", "tokens per second"),
        ("data_wait_seconds", "Speed and memory", "Data wait time", "s"),
        ("memory_gb_max", "Speed and memory", "Memory", "GB"),
        ("mfu", "Speed and memory", "MFU", "share of the device's peak FLOP/s"),
        ("packing_efficiency", "Data", "Packing efficiency", "share"),
        ("never_seen", "Further", "Never seen", "never seen"),
    ],
)
def test_words_of_a_key_say_section_title_and_unit(tmp_path, key, section, title, unit):
    _, found = panels(tmp_path, [{"step": 1, key: 1.0}])
    (panel,) = found.values()
    assert (panel.section, panel.title, panel.unit) == (section, title, unit)


def test_loss_of_several_terms_is_their_sum(tmp_path):
    _, found = panels(tmp_path, [{"step": 1, "loss": 1.0, "MSE": 1.0}])
    assert found["loss"].unit == "weighted sum of its terms"


def test_names_are_file_names_unlike_each_other(tmp_path):
    _, found = panels(tmp_path, [{"step": 1, "a b": 1, "a.b": 2, "A b": 3, "../x": 4, "%": 5}])
    assert [*found] == ["a-b", "a-b-2", "A-b-3", "metric", "metric-2"]


def test_axis_is_logarithmic_for_losses_above_zero_alone(tmp_path):
    lines = [
        {"step": i, "loss": 2.0 - i, "CE": 3.0, "mfu": 0.5, "eval_accuracy": 0.5} for i in (1, 2)
    ]
    _, found = panels(tmp_path, lines)
    assert {name for name, panel in found.items() if panel.is_log} == {"CE"}


def test_schedules_counters_and_evaluations_are_not_smoothed(tmp_path):
    lines = [
        {"step": i, "loss": 1 / i, "eval_loss": 1 / i, "learning_rate": 1 / i, "epoch": i}
        for i in (1, 2)
    ]
    _, found = panels(tmp_path, lines)
    noisy = {curve.key for panel in found.values() for curve in panel.curves if curve.is_noisy}
    assert noisy == {"loss"}
