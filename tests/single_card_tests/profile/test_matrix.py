"""A matrix over simulated cells, the batch sizes that it tries, and its report.

Guarantees: every choice, a policy's attention too, is tried up to its largest fitting batch, by
doubling and bisecting or in the given sizes; every cell runs as often as asked for, its median and
range are shown, and a run that does not fit decides for it; finished cells are not run again, but
cells that failed or ran out of time, have too few runs, or whose settings or model configuration
changed are; a cell that fails for another reason ends only its row and is reported with its error;
choices that do not fit the number of ranks are refused before any cell; the command of a cell
contains all its settings; the report has a row for every cell, a plot, and recommends the fastest
cell below the share of memory for each number of cameras, or says why there is none.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddle_vl.cli.main import build_parser
from paddle_vl.config.load import load_run_config
from paddle_vl.processes import Limits
from paddle_vl.profile import matrix
from paddle_vl.profile.cell_runs import CellOutcome
from paddle_vl.profile.cells import RESULT_FILE, Cell, Growth, MatrixChoice
from paddle_vl.profile.matrix import MatrixSettings, all_choices, run_matrix
from paddle_vl.profile.matrix_report import (
    matrix_figure,
    recommendations,
    series_and_column,
    write_report,
)
from paddle_vl.profile.workload import ProfileSettings, Workload
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import write_tiny_run

# Largest batch that fits, and samples per second of one sample, by sharding choice.
CAPACITY = {"dp": 3, "stage2": 6, "stage3": 5}
SPEED = {"dp": 6.0, "stage2": 5.0, "stage3": 4.0}
NO_KERNEL = CellOutcome("failed", "rank 0: ValueError: no kernel")


def cell(
    sharding: str,
    batch_size: int,
    speed: float = 1.0,
    memory: float = 1.0,
    *,
    cameras: int | None = 1,
    status: str = "ok",
) -> Cell:
    """A cell; if it is ok with one run of that speed, in samples per second."""
    step = 2 * batch_size / speed
    run = {
        "global_samples_per_sec": speed,
        "global_step_time_s": step,
        "samples_per_step": 2 * batch_size,
        "peak_reserved_gb_worst": memory,
        "peak_alloc_gb_worst": memory / 2,
        "memory_limit_gb": 4.0,
        "phase_means_s": {"forward": step / 3, "bwd": step / 2, "total": step},
        "phase_medians_s": {"total": step},
        "per_rank_cpu_time_s": [step, 2 * step],
    }
    choice, runs = MatrixChoice(sharding, "none", cameras), (run,) * (status == "ok")
    return Cell(choice, batch_size, status, "", {"train.adam": [1, 2]}, runs)


class Pretended:
    """Runs cells by their command lines alone.

    Attributes:
        broken: outcomes by sharding choice.
        speeds: samples per second by sharding choice, of one run after the other; None for out of
            memory.
    """

    def __init__(self):
        self.ran: list[tuple[str, int]] = []
        self.folders: list[Path] = []
        self.parsed: list[Any] = []
        self.limits: set[Limits] = set()
        self.broken: dict[str, CellOutcome] = {}
        self.speeds: dict[str, list[float | None]] = {}
        self.ends_at = 999

    def __call__(self, arguments, num_ranks, folder, limits, variables) -> CellOutcome:
        if len(self.ran) == self.ends_at:
            raise KeyboardInterrupt
        options = build_parser().parse_args(arguments)
        given = dict(override.split("=", 1) for override in options.overrides)
        self.parsed.append((options, given))
        assert (num_ranks, options.nproc, Path(options.out)) == (2, 1, folder)
        stage = f"stage{given.get('parallel.sharding_stage')}"
        sharding = "dp" if given["parallel.sharding_degree"] == "1" else stage
        size = int(given["train.per_device_train_batch_size"])
        self.limits.add(limits)
        self.folders.append(folder)
        self.ran.append((sharding, size))
        if sharding in self.broken:
            return self.broken[sharding]
        speed = SPEED[sharding] * size if size <= CAPACITY[sharding] else None
        if sharding in self.speeds:
            speed = self.speeds[sharding].pop(0)
        if speed is None:
            return CellOutcome("oom", "rank 0 uses too much")
        profile = cell(sharding, size, speed, memory=size / 4).profile
        (folder / RESULT_FILE).write_text(json.dumps({**profile, "config": "not kept"}))
        return CellOutcome("ok")


@pytest.fixture
def pretended(monkeypatch) -> Pretended:
    monkeypatch.setattr(matrix, "run_cell", made := Pretended())
    return made


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> str:
    return str(write_tiny_run(tmp_path_factory.mktemp("run")))


@pytest.fixture
def settings(tmp_path) -> MatrixSettings:
    return MatrixSettings(
        ProfileSettings(
            tmp_path / "matrix", Workload(True), warmup_steps=1, steps=2, memory_limit_gb=2.0
        ),
        num_processes=2,
        choices=all_choices(["dp", "stage2"], ["none"], [1]),
        growth=Growth(largest=8, resolution=0),
        seconds=30.0,
    )


@pytest.fixture
def one(settings) -> MatrixSettings:
    return replace(settings, choices=[MatrixChoice("dp", "none", 1)], growth=Growth(sizes=[1]))


def with_profile(settings: MatrixSettings, **changes: object) -> MatrixSettings:
    """The settings with others of each profile."""
    return replace(settings, profile=replace(settings.profile, **changes))


@pytest.mark.parametrize(
    ("growth", "capacity", "tried"),
    [
        (Growth(largest=12), 100, [1, 2, 4, 8, 12]),
        (Growth(largest=64, resolution=0), 11, [1, 2, 4, 8, 16, 12, 10, 11]),
        (Growth(largest=64, resolution=0.25), 11, [1, 2, 4, 8, 16, 12, 10]),
        (Growth(largest=1), 0, [1]),
        (Growth(sizes=[8, 12, 20]), 100, [8, 12, 20]),
        (Growth(sizes=[8, 12, 20, 40]), 12, [8, 12, 20]),
    ],
)
def test_sizes_that_are_tried(growth, capacity, tried):
    fits, found = {}, []
    while (size := growth.next_size(fits)) is not None:
        found.append(size)
        fits[size] = size <= capacity
    assert found == tried


@pytest.mark.parametrize("sizes", [[2, 1], [0, 1]])
def test_senseless_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="ascending"):
        Growth(sizes)


def test_every_choice_is_walked_to_what_fits_once(run_file, settings, pretended):
    cells = run_matrix(run_file, [], settings)
    assert pretended.ran == [
        *(("dp", size) for size in (1, 2, 4, 3)),
        *(("stage2", size) for size in (1, 2, 4, 8, 6, 7)),
    ]
    assert pretended.limits == {Limits(30.0, 2_000_000_000)}
    assert [(c.batch_size, c.status) for c in cells[:4]] == [
        (1, "ok"), (2, "ok"), (3, "ok"), (4, "oom"),
    ]  # fmt: skip
    assert cells[3].detail == "rank 0 uses too much"
    assert "config" not in cells[0].profile
    pretended.ran.clear()
    assert run_matrix(run_file, [], settings) == cells
    assert pretended.ran == []


def test_an_interrupted_matrix_goes_on_where_it_was(run_file, settings, pretended):
    pretended.ends_at = 3
    with pytest.raises(KeyboardInterrupt):
        run_matrix(run_file, [], settings)
    pretended.ends_at = 999
    run_matrix(run_file, [], settings)
    assert pretended.ran[3] == ("dp", 3)


@pytest.mark.parametrize(
    ("overrides", "change", "told"),
    [
        (["train.learning_rate=0.5"], {}, "train.learning_rate"),
        ([], {"steps": 9}, "steps"),
        ([], {"memory_limit_gb": 2.5}, "memory_limit_gb"),
        ([], {"workload": Workload(True, answer_tokens=9)}, "answer_tokens"),
        ([], {}, "FLAGS_use_virtual"),
        ([], {}, "model's config.json"),
    ],
)
def test_what_has_changed_runs_again(
    run_file, one, overrides, change, told, caplog, pretended, monkeypatch, tmp_path
):
    file = tmp_path / "config.json"
    values = load_run_config(run_file).model_dump()["model"]["config"]
    file.write_text(json.dumps(values))
    run_matrix(run_file, [f"model.config={file}"], one)
    if told.startswith("FLAGS"):
        monkeypatch.setenv("FLAGS_use_virtual_memory_auto_growth", "0")
    if told.startswith("model"):
        file.write_text(json.dumps(values | {"tie_word_embeddings": False}))
    with caplog.at_level(logging.INFO, "paddle_vl"):
        longer = replace(with_profile(one, **change), seconds=31.0)
        run_matrix(run_file, [f"model.config={file}", *overrides], longer)
    assert pretended.ran == [("dp", 1)] * 2
    assert f"runs again: {told}" in caplog.text


def test_a_cell_runs_as_often_as_asked_and_its_median_counts(run_file, settings, pretended):
    three = replace(settings, growth=Growth(sizes=[4]), repeats=3)
    pretended.speeds = {"dp": [20.0, 30.0, 26.0], "stage2": [25.0, 31.0, 29.0]}
    dp, stage2 = run_matrix(run_file, [], three)
    name = "dp-recompute_none-cameras_1-batch_4"
    found = [f.relative_to(three.profile.out / "cells").as_posix() for f in pretended.folders[:3]]
    assert found == [name, f"{name}/run_2", f"{name}/run_3"]
    assert (dp.samples_per_sec, dp.speed_range) == (26.0, (20.0, 30.0))
    assert (stage2.samples_per_sec, stage2.speed_range) == (29.0, (25.0, 31.0))
    text = write_report([dp, stage2], three, memory_share=0.8)
    assert "| samples/s | of runs |" in text
    assert "| 26.00 | 20.00 to 30.00 |" in text
    assert "29.00 samples/s (25.00 to 31.00 in 3 runs) with" in text
    values = json.loads((three.profile.out / "matrix.json").read_text())
    assert (values["repeats"], len(values["cells"][0]["runs"])) == (3, 3)
    # Fewer runs are there; more are not.
    assert run_matrix(run_file, [], replace(three, repeats=2)) == [dp, stage2]
    pretended.speeds = {"dp": [1.0, 2.0, 3.0, None], "stage2": [20.0, None]}
    dp, stage2 = run_matrix(run_file, [], replace(three, repeats=4))
    assert (dp.status, dp.detail) == ("oom", "run 4: rank 0 uses too much")
    assert (stage2.status, stage2.detail) == ("oom", "run 2: rank 0 uses too much")


@pytest.mark.parametrize("failure", [NO_KERNEL, CellOutcome("timeout", "not done after 30 s")])
def test_a_failure_ends_its_line_only_and_is_tried_again(run_file, settings, failure, pretended):
    pretended.broken["dp"] = failure
    cells = run_matrix(run_file, [], settings)
    assert (cells[0].status, cells[0].detail) == failure
    assert {c.choice.sharding: c.status for c in cells} == {"dp": failure.status, "stage2": "oom"}
    pretended.broken.clear()
    pretended.ran.clear()
    run_matrix(run_file, [], settings)
    assert pretended.ran == [("dp", size) for size in (1, 2, 4, 3)]


def test_a_cell_that_ends_well_without_a_profile_has_failed(run_file, settings, pretended):
    pretended.broken = dict.fromkeys(CAPACITY, CellOutcome("ok"))
    cells = run_matrix(run_file, [], settings)
    assert [(c.status, c.detail) for c in cells] == [("failed", "ended well without a profile")] * 2
    text = write_report(cells, settings, memory_share=0.8)
    assert "**Recommended with 1 camera(s): nothing.** none of the 2 cells ran." in text
    assert (settings.profile.out / "matrix.png").exists()


@pytest.mark.parametrize(
    ("overrides", "choice", "processes", "message"),
    [
        ([], MatrixChoice("stage2", "none"), 1, "sharding choice dp with 1 process"),
        ([], MatrixChoice("none", "none"), 2, "sharding choice none with 2 process"),
        ([], MatrixChoice("dp", "some"), 2, "train.recompute"),
        (["parallel.mp_degree=2"], MatrixChoice("dp", "none"), 3, "3 processes do not divide"),
        (None, MatrixChoice("dp", "none"), 2, "--memory-limit-gb"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_cell(
    run_file, settings, overrides, choice, processes, message, pretended
):
    choices = [MatrixChoice("dp", "none"), choice]
    refused = replace(settings, choices=choices, num_processes=processes)
    if overrides is None:
        refused = with_profile(refused, memory_limit_gb=None)
    with pytest.raises(ValueError, match=message):
        run_matrix(run_file, overrides or [], refused)
    assert pretended.ran == []


def test_a_gpus_memory_is_not_watched_from_outside(settings, monkeypatch):
    monkeypatch.setattr(matrix.paddle, "get_device", lambda: "gpu:0")
    assert settings.limits == Limits(30.0, None)


def test_the_command_of_a_cell_says_all_that_concerns_it(settings, tmp_path, pretended):
    """Of a policy, whose attention is a choice."""
    choices = all_choices(["stage3"], ["none", "full"], [2], ["eager", "sdpa"])
    workload = Workload(True, image_side=64, answer_tokens=7)
    asked = replace(
        with_profile(settings, workload=workload), choices=choices, growth=Growth(sizes=[4])
    )
    pretended.broken["stage3"] = NO_KERNEL
    run_file = str(write_tiny_policy_run(tmp_path / "policy"))
    cells = run_matrix(run_file, ["train.seed=3"], asked)
    assert [folder.name for folder in pretended.folders] == [
        f"stage3-recompute_{recompute}-attention_{attention}-cameras_2-batch_4"
        for recompute in ("none", "full")
        for attention in ("eager", "sdpa")
    ]
    options, given = pretended.parsed[1]
    assert (options.warmup, options.steps, options.cameras) == (1, 2, [2])
    assert (options.synthetic, options.image_side, options.answer_tokens) == (True, 64, 7)
    assert (options.memory_limit_gb, options.matrix) == (2.0, False)
    assert given == {
        "train.seed": "3",
        "train.recompute": "none",
        "model.policy.gradient_checkpointing": "false",
        "model.policy.attention_implementation": "sdpa",
        "parallel.dp_degree": "1",
        "parallel.sharding_degree": "2",
        "parallel.sharding_stage": "3",
        "train.per_device_train_batch_size": "4",
    }
    assert pretended.parsed[2][1]["model.policy.gradient_checkpointing"] == "true"
    text = write_report(cells, asked, memory_share=0.8)
    assert "| sharding | attention | recompute |" in text
    assert "| stage3 | sdpa | full | 2 | 4 | failed |" in text


def test_a_damaged_cell_file_is_named(run_file, one, pretended):
    folder = one.profile.out / "cells" / "dp-recompute_none-cameras_1-batch_1"
    folder.mkdir(parents=True)
    (folder / "cell.json").write_text("{}")
    with pytest.raises(RuntimeError, match=r"cell\.json is not a cell"):
        run_matrix(run_file, [], one)


def test_report_has_all_cells_what_to_take_and_a_plot(run_file, settings, pretended):
    shardings = ["dp", "stage2", "stage3"]
    settings = replace(settings, choices=all_choices(shardings, ["none"], [1, 2]))
    pretended.broken["dp"] = NO_KERNEL
    cells = run_matrix(run_file, [], settings)
    text = write_report(cells, settings, memory_share=0.8)
    assert text == (settings.profile.out / "matrix.md").read_text()
    assert "| stage2 | none | 1 | 7 | OOM |" in text
    assert "| stage2 | none | 2 | 6 | 0.75 | 1.50 | 75 % | 400 | 400 | 200 | 600 | 30.00 |" in text
    assert "**Recommended with 2 camera(s): stage2, recompute none, 2 camera(s), batch 6.**" in text
    tables = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert set(tables) == {13}
    assert "batch 1: failed, rank 0: ValueError: no kernel" in text
    values = json.loads((settings.profile.out / "matrix.json").read_text())
    assert len(values["cells"]) == len(cells)
    assert values["recommendations"][0]["cell"] == "stage2-recompute_none-cameras_1-batch_6"
    assert (settings.profile.out / "matrix.png").read_bytes().startswith(b"\x89PNG")


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
    cells += [cell("stage3", 8, status="oom"), cell("stage3", 16, status="failed")]
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


def test_the_legend_has_room():
    shardings = ["dp", "stage1", "stage2", "stage3"]
    choices = all_choices(shardings, ["none", "full"], [1, 2], ["eager", "sdpa"])
    figure = matrix_figure([replace(cell("dp", 4, 20.0), choice=choice) for choice in choices], 2.0)
    figure.canvas.draw()
    (legend,) = figure.legends
    box, room = legend.get_window_extent(), figure.bbox
    assert room.x0 <= box.x0
    assert box.x1 <= room.x1
    assert len(legend.get_texts()) == len(shardings)


CELLS = [
    cell("stage2", 4, 20.0, 2.0),
    cell("stage2", 8, 25.0, 3.0),
    cell("stage2", 16, 27.0, 3.9),
    cell("stage2", 32, status="oom"),
    cell("stage3", 8, 15.0, 2.5),
    cell("dp", 2, status="failed"),
]


@pytest.mark.parametrize(
    ("cells", "limit", "share", "chosen", "told", "untold"),
    [
        (CELLS, 4.0, 0.85, 1, "25.00 samples/s with 3.00 GB, 75 % of the limit", "nothing"),
        (CELLS, 4.0, 0.85, 1, "batch 16 makes 27.00, but takes 3.90 GB, above 85 %", "nothing"),
        (CELLS, 4.0, 1.0, 2, "27.00", "but takes"),
        (CELLS, None, 0.85, 2, "27.00", "limit"),
        (CELLS[:3], 2.0, 0.85, None, "batch 4, takes 2.00 GB", "samples/s"),
        (CELLS[:3], 2.0, 0.85, None, "none of the 3 cells that ran stays below 85 % of 2 GB", "/s"),
    ],
)
def test_the_fastest_cell_below_the_share_is_recommended(cells, limit, share, chosen, told, untold):
    (found,) = recommendations(cells, limit, share)
    assert found.cell is (None if chosen is None else cells[chosen])
    assert told in found.reason
    assert untold not in found.reason


def test_cameras_are_a_task_of_their_own_and_a_share_is_one():
    cells = [*CELLS, cell("stage3", 4, 3.0, cameras=4)]
    one, four = recommendations(cells, 4.0, 0.85)
    assert (one.cameras, four.cameras, four.cell) == (1, 4, cells[-1])
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match="memory share"):
            recommendations(CELLS, 4.0, share)
