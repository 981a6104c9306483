"""Several runs of a cell, the attention as a choice, and the bars of the plot.

Guarantees: every cell runs as often as asked for, unless its results are known; its median and its
range are shown, and a comparison says when ranges overlap; a run that does not fit decides for
its cell; a policy's attention is a choice like the others; bars have the numbers, do not overlap,
and what does not fit is marked.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paddle_vl.profile.cell_runs import CellOutcome
from paddle_vl.profile.cells import RESULT_FILE, Cell, Growth, MatrixChoice
from paddle_vl.profile.matrix import MatrixSettings, all_choices, run_matrix
from paddle_vl.profile.matrix_report import matrix_figure, series_and_column, write_report
from tests.single_card_tests.profile.measures import cell
from tests.single_card_tests.profile.pretended_cells import Pretended, matrix_settings
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import write_tiny_run


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    return str(write_tiny_run(tmp_path_factory.mktemp("run")))


@pytest.fixture
def settings(tmp_path):
    return matrix_settings(tmp_path / "matrix")


def varied(out: Path, speeds: dict[str, list[float | None]]):
    """Runs cells with these samples per second by run, None for out of memory."""
    counts: dict[str, int] = {}
    ran = []

    def run(arguments, num_ranks, folder, limits, variables):
        _, given = Pretended.parsed(arguments)
        sharding = "dp" if given["parallel.sharding_degree"] == "1" else "stage2"
        ran.append(folder.relative_to(out / "cells").as_posix())
        number = counts[sharding] = counts.get(sharding, 0) + 1
        speed = speeds[sharding][number - 1]
        if speed is None:
            return CellOutcome("oom", "rank 1 uses too much")
        profile = cell(sharding, 4, speed).profile
        (folder / RESULT_FILE).write_text(json.dumps(profile))
        return CellOutcome("ok")

    run.ran = ran
    return run


def test_every_cell_runs_several_times_and_its_median_counts(run_file, settings):
    one = replace(settings, growth=Growth(sizes=[4]), repeats=3)
    run = varied(settings.profile.out, {"dp": [20.0, 30.0, 26.0], "stage2": [25.0, 31.0, 29.0]})
    dp, stage2 = run_matrix(run_file, [], one, run)
    name = "dp-recompute_none-cameras_1-batch_4"
    assert run.ran[:3] == [name, f"{name}/run_2", f"{name}/run_3"]
    assert (dp.samples_per_sec, dp.speed_range) == (26.0, (20.0, 30.0))
    assert (stage2.samples_per_sec, stage2.speed_range) == (29.0, (25.0, 31.0))
    text = write_report([dp, stage2], one, memory_share=0.8)
    assert "| samples/s | of runs |" in text
    assert "| 26.00 | 20.00 to 30.00 |" in text
    assert "29.00 samples/s (25.00 to 31.00 in 3 runs) with" in text
    values = json.loads((settings.profile.out / "matrix.json").read_text())
    assert values["repeats"] == 3
    speeds = [run["global_samples_per_sec"] for run in values["cells"][0]["runs"]]
    assert speeds == [20.0, 30.0, 26.0]


def test_a_run_that_does_not_fit_decides_for_its_cell(run_file, settings):
    one = replace(settings, growth=Growth(sizes=[4]), repeats=3, choices=settings.choices[:1])
    run = varied(settings.profile.out, {"dp": [20.0, None]})
    (found,) = run_matrix(run_file, [], one, run)
    assert (found.status, found.detail) == ("oom", "run 2: rank 1 uses too much")
    assert len(run.ran) == 2


def test_a_cell_runs_again_for_more_runs_and_not_for_fewer(run_file, settings):
    one = replace(settings, growth=Growth(sizes=[4]), choices=settings.choices[:1], repeats=2)
    run_matrix(run_file, [], one, varied(settings.profile.out, {"dp": [20.0, 24.0]}))
    again = varied(settings.profile.out, {"dp": [1.0, 2.0, 3.0]})
    (found,) = run_matrix(run_file, [], replace(one, repeats=1), again)
    assert (again.ran, found.speed_range, found.samples_per_sec) == ([], (20.0, 24.0), 20.0)
    (found,) = run_matrix(run_file, [], replace(one, repeats=3), again)
    assert (len(again.ran), found.samples_per_sec) == (3, 2.0)


def write_into(settings: MatrixSettings, cells: list[Cell]) -> str:
    settings.profile.out.mkdir(exist_ok=True)
    return write_report(cells, settings, memory_share=0.8)


def test_a_policys_attention_is_a_choice(settings, tmp_path):
    commands = []

    def keep(arguments, num_ranks, folder, limits, variables):
        commands.append((folder.name, Pretended.parsed(arguments)[1]))
        return CellOutcome("failed", "")

    choices = all_choices(["dp"], ["none", "full"], [1], ["eager", "sdpa"])
    run_file = str(write_tiny_policy_run(tmp_path / "policy"))
    cells = run_matrix(
        run_file, [], replace(settings, choices=choices, growth=Growth(sizes=[2])), keep
    )
    assert [name for name, _ in commands] == [
        f"dp-recompute_{recompute}-attention_{attention}-cameras_1-batch_2"
        for recompute in ("none", "full")
        for attention in ("eager", "sdpa")
    ]
    chosen = [
        (given["model.policy.attention_implementation"], given["train.recompute"],
         given["model.policy.gradient_checkpointing"])
        for _, given in commands
    ]  # fmt: skip
    assert chosen[1:3] == [("sdpa", "none", "false"), ("eager", "full", "true")]
    text = write_into(settings, cells)
    assert "| sharding | attention | recompute |" in text
    assert "| dp | sdpa | full | 1 | 2 | failed |" in text


def test_a_setting_that_differs_gives_the_colours_and_the_others_the_columns():
    found = series_and_column(all_choices(["none"], ["none", "full"], [1, 2], ["eager", "sdpa"]))
    assert set(found.values()) == {
        (f"{attention} attention", f"recompute {recompute}")
        for attention in ("eager", "sdpa")
        for recompute in ("none", "full")
    }
    assert [*series_and_column([MatrixChoice("dp", "full")]).values()] == [("dp", "")]


def test_bars_have_the_numbers_and_what_does_not_fit_is_marked():
    cells = [cell("stage2", 4, 20.0), cell("stage3", 4, 10.0), cell("stage2", 8, 30.0)]
    cells.append(replace(cell("stage3", 8, 1.0), status="oom", runs=()))
    cells.append(replace(cell("stage3", 16, 1.0), status="failed", runs=()))
    speed, memory = matrix_figure(cells, 2.0).axes
    assert [bar.get_height() for bar in speed.patches] == [20.0, 10.0, 30.0]
    assert [bar.get_height() for bar in memory.patches] == [c.memory_gb for c in cells[:3]]
    assert [label.get_text() for label in memory.get_xticklabels()] == ["4", "8"]
    assert (speed.get_ylabel(), memory.get_ylabel()) == ("samples/s, all ranks", "GB, largest rank")
    (mark,) = speed.lines
    assert mark.get_marker() == "x"
    # Colours of shardings are the same in every plot, and bars do not overlap.
    stage2, stage3 = speed.patches[:2]
    (alone,) = matrix_figure([cells[1]], None).axes[0].patches
    assert alone.get_facecolor() == stage3.get_facecolor() != stage2.get_facecolor()
    assert stage2.get_x() + stage2.get_width() <= stage3.get_x()


@pytest.mark.parametrize("shardings", [["none"], ["dp", "stage1", "stage2", "stage3"]])
@pytest.mark.parametrize("cameras", [[1], [1, 2]])
def test_the_legend_has_room(shardings, cameras):
    choices = all_choices(shardings, ["none", "full"], cameras, ["eager", "sdpa"])
    cells = [replace(cell("dp", 4, 20.0), choice=choice) for choice in choices]
    figure = matrix_figure(cells, 2.0)
    figure.canvas.draw()
    (legend,) = figure.legends
    box, room = legend.get_window_extent(), figure.bbox
    assert room.x0 <= box.x0
    assert box.x1 <= room.x1
    assert len(legend.get_texts()) == max(2, len(shardings))
