"""Several runs of a cell, the attention as a choice, and the looks of lines in the plot.

Guarantees: every cell runs as often as asked for, and known runs are not repeated; its median and
its range are shown, and a comparison says when ranges overlap; a run that does not fit decides for
its cell; a policy's attention is a choice like the others; lines of one sharding differ in colour;
cells written before are read.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paddle_vl.profile.cells import RESULT_FILE, Cell, Choice, Steps, of_several_runs
from paddle_vl.profile.matrix import MatrixSettings, all_choices, run_matrix
from paddle_vl.profile.matrix_plot import looks, matrix_figure
from paddle_vl.profile.matrix_report import write_report
from paddle_vl.profile.supervise import Outcome
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

    def run(command, folder, limits):
        _, given = Pretended.parsed(command)
        sharding = "dp" if given["parallel.sharding_degree"] == "1" else "stage2"
        ran.append(folder.relative_to(out / "cells").as_posix())
        number = counts[sharding] = counts.get(sharding, 0) + 1
        speed = speeds[sharding][number - 1]
        if speed is None:
            return Outcome("oom", "rank 1 uses too much")
        profile = cell(sharding, 4, speed).profile
        (folder / RESULT_FILE).write_text(json.dumps(profile))
        return Outcome("ok")

    run.ran = ran
    return run


def test_every_cell_runs_several_times_and_its_median_counts(run_file, settings):
    one = replace(settings, growth=Steps([4]), repeats=3)
    run = varied(settings.out, {"dp": [20.0, 30.0, 26.0], "stage2": [25.0, 31.0, 29.0]})
    dp, stage2 = run_matrix(run_file, [], one, run)
    name = "dp-recompute_none-cameras_1-batch_4"
    assert run.ran[:3] == [name, f"{name}/run_2", f"{name}/run_3"]
    assert (dp.samples_per_sec, dp.speed_range) == (26.0, (20.0, 30.0))
    assert (stage2.samples_per_sec, stage2.speed_range) == (29.0, (25.0, 31.0))
    text = write_report([dp, stage2], one, memory_share=0.8)
    assert "| samples/s | of runs |" in text
    assert "| 26.00 | 20.00 to 30.00 |" in text
    assert "29.00 samples/s (25.00 to 31.00 in 3 runs) with" in text
    values = json.loads((settings.out / "matrix.json").read_text())
    assert values["repeats"] == 3
    speeds = [run["global_samples_per_sec"] for run in values["cells"][0]["runs"]]
    assert speeds == [20.0, 30.0, 26.0]


def test_a_run_that_does_not_fit_decides_for_its_cell(run_file, settings):
    one = replace(settings, growth=Steps([4]), repeats=3, choices=settings.choices[:1])
    run = varied(settings.out, {"dp": [20.0, None]})
    (found,) = run_matrix(run_file, [], one, run)
    assert (found.status, found.detail) == ("oom", "run 2: rank 1 uses too much")
    assert len(run.ran) == 2


def test_more_runs_of_known_cells_run_only_those(run_file, settings):
    one = replace(settings, growth=Steps([4]), choices=settings.choices[:1])
    run_matrix(run_file, [], one, varied(settings.out, {"dp": [20.0]}))
    again = varied(settings.out, {"dp": [24.0]})
    (found,) = run_matrix(run_file, [], replace(one, repeats=2), again)
    assert again.ran == ["dp-recompute_none-cameras_1-batch_4/run_2"]
    assert (found.speed_range, found.samples_per_sec) == ((20.0, 24.0), 20.0)


def test_ranges_that_overlap_are_told_in_a_comparison(run_file, settings):
    def runs(sharding: str, *speeds: float) -> Cell:
        return of_several_runs([cell(sharding, 4, speed) for speed in speeds])

    near = [runs("stage2", 10.0, 13.0, 11.0), runs("stage3", 9.0, 10.5, 9.5)]
    far = [runs("stage2", 12.0, 13.0), runs("stage3", 9.0, 10.5)]
    assert "1.16x (ranges overlap) |" in write_into(settings, near)
    assert "ranges overlap" not in write_into(settings, far)
    # One run has no range.
    assert "ranges overlap" not in write_into(settings, [near[0], cell("stage3", 4, 10.5)])


def write_into(settings: MatrixSettings, cells: list[Cell]) -> str:
    settings.out.mkdir(exist_ok=True)
    return write_report(cells, settings, memory_share=0.8)


def test_a_policys_attention_is_a_choice(settings, tmp_path):
    commands = []

    def keep(command, folder, limits):
        commands.append((folder.name, Pretended.parsed(command)[1]))
        return Outcome("failed", "")

    choices = all_choices(["dp"], ["none", "full"], [1], ["eager", "sdpa"])
    run_file = str(write_tiny_policy_run(tmp_path / "policy"))
    cells = run_matrix(run_file, [], replace(settings, choices=choices, growth=Steps([2])), keep)
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


def test_lines_of_one_sharding_differ_in_colour():
    found = looks(all_choices(["none"], ["none", "full"], [1, 2], ["eager", "sdpa"]))
    by_line = {(look.colour, look.style, look.marker) for look in found.values()}
    assert len(by_line) == 4
    assert len({look.colour for look in found.values()}) == 2
    assert {look.label for look in found.values()} == {
        f"{attention} attention, recompute {recompute}"
        for attention in ("eager", "sdpa")
        for recompute in ("none", "full")
    }
    # Colours of shardings are the same in every plot.
    both = looks(all_choices(["stage3", "stage2"], ["none"], [1]))
    assert [look.colour for look in both.values()] == ["C3", "C1"]
    (alone,) = looks([Choice("dp", "full")]).values()
    assert alone.label == "dp"


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
    assert len(legend.get_texts()) == 4 * len(shardings)


def test_a_cell_of_before_attention_was_a_choice_is_read(tmp_path):
    written = cell("stage2", 4, 20.0)
    written.write(tmp_path)
    values = json.loads((tmp_path / "cell.json").read_text())
    del values["choice"]["attention"], values["runs"]
    (tmp_path / "cell.json").write_text(json.dumps(values))
    assert Cell.read(tmp_path) == written
