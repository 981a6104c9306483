"""Panels of a report.

Guarantees: every metric of every run, known or not, is in exactly one panel; evaluations,
components and statistics share the panel of their metric; a series looks the same in all panels;
numbers of several ranks say what they are; panels without anything to see are folded; a run without
a metric is left out of its panel; panel names are unique file names; a loss starts with a
logarithmic axis if all values are positive.
"""

from collections import Counter

import pytest

from paddle_vl.report.panels import Panel, panels_of
from paddle_vl.report.runs import Run, read_runs
from tests.single_card_tests.report.run_folders import LINES, START, without, write_run

GRADIENT, SPEED = "Learning rate and gradient", "Speed and memory"


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
    labels = {name: [curve.label for curve in panel.curves] for name, panel in found.items()}
    assert labels["learning_rate"] == ["all other parts", "model.visual.*"]
    assert labels["tokens_per_expert"] == ["lowest", "highest"]
    assert [curve.look for curve in found["tokens_per_expert"].curves] == [0, 0]


def test_a_series_looks_the_same_in_all_panels(tmp_path):
    line = {
        "step": 1, "learning_rate": 1.0, "learning_rate/mergers": 1.0, "tokens": 3, "tokens/web": 1,
        "tokens/books": 2, "epochs/books": 1.0, "eval_loss": 1.0, "eval_loss/books": 1.0,
        "eval_loss/web": 1.0, "loss": 1.0, "grad_norm": 1.0,
    }  # fmt: skip
    _, found = panels(tmp_path, [line])
    looks = {}
    for panel in found.values():
        for curve in panel.curves:
            series = curve.key.partition("/")[2] or ("evaluation" if curve.is_eval else "training")
            looks.setdefault(series, set()).add(curve.look)
    assert looks == {
        "training": {0}, "evaluation": {1}, "mergers": {2}, "web": {3}, "books": {4}
    }  # fmt: skip


def test_what_has_nothing_to_see_is_folded(tmp_path):
    line = {
        "loss": 1.0, "skipped_updates": 0, "skipped_samples": 0, "tokens_per_step_sum": 4.0,
        "tokens_per_step_mean": 4.0, "rank_sequence_length_sum": 2.0, "memory_gb": 1.0,
    }  # fmt: skip
    lines = [line | {"step": 1}, line | {"step": 2, "skipped_samples": 1}]
    one, several = (
        {panel.title: panel.is_folded for panel in panels_of(read_runs([folder]))}
        for folder in (
            write_run(tmp_path / "one", lines, starts=[START | {"num_processes": 1}]),
            write_run(tmp_path / "several", lines, starts=[START]),
        )
    )
    assert [title for title, is_folded in several.items() if is_folded] == ["Skipped updates"]
    assert {title for title, is_folded in one.items() if is_folded} == {
        "Skipped updates", "Tokens per step (per rank)", "Mean sequence length (sum of the ranks)"
    }  # fmt: skip
    assert {*several} >= {
        "Memory (fullest rank)", "Tokens per step (all ranks)", "Tokens per step (per rank)"
    }  # fmt: skip
    assert {*one} >= {"Memory", "Tokens per step"}


@pytest.mark.parametrize(
    ("key", "section", "title", "unit"),
    [
        ("loss", "Loss", "Loss", "nats per target token"),
        ("CE", "Loss", "Cross entropy (CE)", "mean, before its weight"),
        ("ABC", "Loss", "ABC", "mean, before its weight"),
        ("eval_accuracy", "Loss", "Accuracy", "accuracy"),
        ("grad_norm", GRADIENT, "Gradient norm", "global norm before clipping"),
        ("tokens_per_second", SPEED, "Tokens per second (all ranks)", "tokens per second"),
        ("data_wait_seconds", SPEED, "Data wait time (slowest rank)", "s"),
        ("memory_gb_max", SPEED, "Memory (fullest rank)", "GB"),
        ("mfu", SPEED, "Model FLOP utilization (MFU)", "share of the device's peak FLOP/s"),
        ("packing_efficiency", "Data", "Packing efficiency", "share"),
        ("never_seen", "Further", "Never seen", "never seen"),
    ],
)
def test_words_of_a_key_say_section_title_and_unit(tmp_path, key, section, title, unit):
    _, found = panels(tmp_path, [{"step": 1, key: 1.0}])
    (panel,) = found.values()
    assert (panel.section, panel.title, panel.unit) == (section, title, unit)


def test_axes_units_names_and_smoothing_follow_from_the_numbers(tmp_path):
    odd = {"a b": 1, "a.b": 2, "A b": 3, "../x": 4, "%": 5}
    lines = [
        {"step": i, "loss": 2.0 - i, "CE": 3 / i, "mfu": 0.5, "eval_loss": 1 / i, "epoch": i} | odd
        for i in (1, 2)
    ]
    _, found = panels(tmp_path, lines)
    assert {name for name, panel in found.items() if panel.is_log} == {"CE"}
    assert found["loss"].unit == "weighted sum of its terms"
    noisy = {curve.key for panel in found.values() for curve in panel.curves if curve.is_noisy}
    assert noisy == {"loss", "CE"}
    # File names that differ in more than case.
    assert {*found} >= {"a-b", "a-b-2", "A-b-3", "metric", "metric-2"}
