"""A matrix over simulated cells, and its report.

Guarantees: every choice is tried up to its largest fitting batch; finished cells are not run again,
but cells that failed, that ran out of time (if there is now more), or whose settings or model
configuration changed are; a cell that fails for another reason ends only its row and is reported
with its error, never as out of memory; choices that do not fit the number of ranks are refused
before any cell; the command of a cell contains all its settings; the report has a row for every
cell, the recommendation, the comparison and a plot; every cell runs as often as asked for and is
shown with its median and range, and a run that does not fit decides; a policy's attention is a
choice like the others; lines of one sharding differ in colour.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from paddle_vl.cli.main import build_parser
from paddle_vl.config.load import load_run_config
from paddle_vl.profile import matrix
from paddle_vl.profile.cells import (
    RESULT_FILE,
    Cell,
    Choice,
    Doubling,
    Steps,
    of_several_runs,
)
from paddle_vl.profile.matrix import MatrixSettings, all_choices, run_matrix
from paddle_vl.profile.matrix_plot import looks
from paddle_vl.profile.matrix_report import write_report
from paddle_vl.profile.supervise import Limits, Outcome
from paddle_vl.profile.workload import Workload
from tests.single_card_tests.profile.measures import cell
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import write_tiny_run

# Largest batch that fits, and samples per second of one sample, by sharding choice.
CAPACITY = {"dp": 3, "stage2": 6, "stage3": 5}
SPEED = {"dp": 6.0, "stage2": 5.0, "stage3": 4.0}


@pytest.fixture
def run_file(tmp_path):
    return str(write_tiny_run(tmp_path / "run"))


@pytest.fixture
def settings(tmp_path):
    return MatrixSettings(
        out=tmp_path / "matrix",
        num_processes=2,
        choices=all_choices(["dp", "stage2"], ["none"], [1]),
        growth=Doubling(largest=8, resolution=0),
        seconds=30.0,
        memory_limit_gb=2.0,
        warmup_steps=1,
        steps=2,
        workload=Workload(is_synthetic=True),
    )


class Pretended:
    """Runs cells by their command line alone; `broken` gives the outcome for a sharding choice."""

    def __init__(self, broken: dict[str, Outcome] | None = None):
        self.ran: list[tuple[str, int]] = []
        self.limits: set[Limits] = set()
        self.broken = broken or {}

    def __call__(self, command: list[str], folder: Path, limits: Limits) -> Outcome:
        options, given = self.parsed(command)
        stage = f"stage{given['parallel.sharding_stage']}"
        sharding = "dp" if given["parallel.sharding_degree"] == "1" else stage
        size = int(given["train.per_device_train_batch_size"])
        self.limits.add(limits)
        assert Path(options.out) == folder
        self.ran.append((sharding, size))
        if sharding in self.broken:
            return self.broken[sharding]
        if size > CAPACITY[sharding]:
            return Outcome("oom", "rank 0 uses too much")
        speed = SPEED[sharding] * size
        profile = cell(sharding, size, speed, memory=size / 4).profile
        (folder / RESULT_FILE).write_text(json.dumps({**profile, "config": "not kept"}))
        return Outcome("ok")

    @staticmethod
    def parsed(command: list[str]):
        options = build_parser().parse_args(command[2:])
        given = dict(override.split("=", 1) for override in options.overrides)
        return options, {"parallel.sharding_stage": "none", **given}


def test_every_choice_is_walked_to_what_fits(run_file, settings):
    run = Pretended()
    cells = run_matrix(run_file, [], settings, run)
    assert run.ran == [
        *(("dp", size) for size in (1, 2, 4, 3)),
        *(("stage2", size) for size in (1, 2, 4, 8, 6, 7)),
    ]
    assert run.limits == {Limits(30.0, 2_000_000_000)}
    assert [(c.batch_size, c.status) for c in cells[:4]] == [
        (1, "ok"), (2, "ok"), (3, "ok"), (4, "oom"),
    ]  # fmt: skip
    assert cells[3].detail == "rank 0 uses too much"
    assert "config" not in cells[0].profile


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


def test_a_cell_of_before_attention_was_a_choice_is_read(tmp_path):
    written = cell("stage2", 4, 20.0)
    written.write(tmp_path)
    values = json.loads((tmp_path / "cell.json").read_text())
    del values["choice"]["attention"], values["runs"]
    (tmp_path / "cell.json").write_text(json.dumps(values))
    assert Cell.read(tmp_path) == written


def test_cells_that_ended_are_not_run_again(run_file, settings):
    first = run_matrix(run_file, [], settings, Pretended())
    again = Pretended()
    assert run_matrix(run_file, [], settings, again) == first
    assert again.ran == []


def test_an_interrupted_matrix_goes_on_where_it_was(run_file, settings):
    class Interrupted(Pretended):
        def __call__(self, *arguments):
            if len(self.ran) == 3:
                raise KeyboardInterrupt
            return super().__call__(*arguments)

    with pytest.raises(KeyboardInterrupt):
        run_matrix(run_file, [], settings, Interrupted())
    rest = Pretended()
    run_matrix(run_file, [], settings, rest)
    assert rest.ran[0] == ("dp", 3)


@pytest.mark.parametrize(
    ("overrides", "change", "told"),
    [
        (["train.learning_rate=0.5"], {}, "train.learning_rate"),
        ([], {"steps": 9}, "steps"),
        ([], {"memory_limit_gb": 2.5}, "memory_limit_gb"),
        ([], {"workload": Workload(True, answer_tokens=9)}, "answer_tokens"),
    ],
)
def test_a_changed_configuration_is_noticed(run_file, settings, overrides, change, told, caplog):
    one = replace(settings, choices=[Choice("dp", "none", 1)], growth=Steps([1]))
    run_matrix(run_file, [], one, Pretended())
    changed = Pretended()
    with caplog.at_level(logging.INFO, "paddle_vl"):
        run_matrix(run_file, overrides, replace(one, **change, seconds=31.0), changed)
    assert changed.ran == [("dp", 1)]
    assert f"runs again: {told}" in caplog.text


def test_a_changed_model_file_is_noticed(run_file, settings, tmp_path):
    one = replace(settings, choices=[Choice("dp", "none", 1)], growth=Steps([1]))
    file = tmp_path / "config.json"
    values = load_run_config(run_file).model_dump()["model"]["config"]
    overrides = [f"model.config={file}"]
    file.write_text(json.dumps(values))
    run_matrix(run_file, overrides, one, Pretended())
    file.write_text(json.dumps(values | {"tie_word_embeddings": False}))
    changed = Pretended()
    run_matrix(run_file, overrides, one, changed)
    assert changed.ran == [("dp", 1)]


def test_a_failure_ends_its_line_only_and_is_tried_again(run_file, settings):
    failure = Outcome("failed", "rank 1: ValueError: no kernel")
    cells = run_matrix(run_file, [], settings, Pretended({"dp": failure}))
    assert (cells[0].status, cells[0].detail) == failure
    assert {c.choice.sharding: c.status for c in cells} == {"dp": "failed", "stage2": "oom"}
    again = Pretended()
    run_matrix(run_file, [], settings, again)
    assert again.ran == [("dp", size) for size in (1, 2, 4, 3)]


def test_a_cell_that_was_out_of_time_is_tried_again_with_more_of_it(run_file, settings):
    slow = Pretended({"dp": Outcome("timeout", "not done")})
    one = replace(settings, choices=[Choice("dp", "none", 1)])
    run_matrix(run_file, [], one, slow)
    run_matrix(run_file, [], one, slow)
    assert slow.ran == [("dp", 1)]
    run_matrix(run_file, [], replace(one, seconds=60.0), slow)
    assert slow.ran == [("dp", 1)] * 2


def test_a_cell_that_ends_well_without_a_profile_has_failed(run_file, settings):
    cells = run_matrix(run_file, [], settings, lambda *_: Outcome("ok"))
    assert [(c.status, c.detail) for c in cells] == [("failed", "ended well without a profile")] * 2


@pytest.mark.parametrize(
    ("choice", "processes", "message"),
    [
        (Choice("stage2", "none"), 1, "sharding choice dp with 1 process"),
        (Choice("none", "none"), 2, "sharding choice none with 2 process"),
        (Choice("dp", "some"), 2, "train.recompute"),
    ],
)
def test_choices_that_do_not_fit_are_refused_before_any_cell(
    run_file, settings, choice, processes, message
):
    refused = replace(settings, choices=[Choice("dp", "none"), choice], num_processes=processes)
    run = Pretended()
    with pytest.raises(ValueError, match=message):
        run_matrix(run_file, [], refused, run)
    assert run.ran == []


def test_a_matrix_on_a_cpu_needs_a_limit(run_file, settings):
    with pytest.raises(ValueError, match="--memory-limit-gb"):
        run_matrix(run_file, [], replace(settings, memory_limit_gb=None), Pretended())


def test_a_gpus_memory_is_not_watched_from_outside(settings, monkeypatch):
    assert settings.limits == Limits(30.0, 2_000_000_000)
    monkeypatch.setattr(matrix.paddle, "get_device", lambda: "gpu:0")
    assert settings.limits == Limits(30.0, None)
    assert replace(settings, memory_limit_gb=None).limits == Limits(30.0, None)


def test_mp_processes_share_samples(run_file):
    config = load_run_config(run_file, ["parallel.mp_degree=2"])
    given = Choice("stage3", "full", 2).overrides(config, 4, 8)
    assert given == [
        "parallel.dp_degree=1", "parallel.sharding_degree=2", "train.recompute=full",
        "train.per_device_train_batch_size=8", "parallel.sharding_stage=3",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="3 processes do not divide"):
        Choice("dp", "none").overrides(config, 3, 8)


def test_the_command_of_a_cell_says_all_that_concerns_it(run_file, settings):
    commands = []

    def keep(command, folder, limits):
        commands.append(command)
        return Outcome("failed", "")

    workload = Workload(True, image_side=64, answer_tokens=7)
    choices = [Choice("stage3", "full", 2)]
    run_matrix(
        run_file,
        ["train.seed=3"],
        replace(settings, workload=workload, choices=choices, growth=Steps([4])),
        keep,
    )
    options, given = Pretended.parsed(commands[0])
    assert (options.nproc, options.warmup, options.steps, options.cameras) == (2, 1, 2, [2])
    assert (options.synthetic, options.image_side, options.answer_tokens) == (True, 64, 7)
    assert options.memory_limit_gb == 2.0
    assert not options.matrix
    assert given["train.seed"] == "3"
    assert given["train.recompute"] == "full"
    assert given["parallel.sharding_stage"] == "3"


def test_a_damaged_cell_file_is_named(run_file, settings):
    folder = settings.out / "cells" / "dp-recompute_none-cameras_1-batch_1"
    folder.mkdir(parents=True)
    (folder / "cell.json").write_text("{}")
    with pytest.raises(RuntimeError, match=r"cell\.json is not a cell"):
        run_matrix(run_file, [], settings, Pretended())


def test_report_has_all_cells_what_to_take_and_a_plot(run_file, settings):
    shardings = ["dp", "stage2", "stage3"]
    settings = replace(settings, choices=all_choices(shardings, ["none"], [1, 2]))
    broken = Pretended({"dp": Outcome("failed", "rank 0: ValueError: no kernel")})
    cells = run_matrix(run_file, [], settings, broken)
    text = write_report(cells, settings, memory_share=0.8)
    assert text == (settings.out / "matrix.md").read_text()
    assert "| stage2 | none | 1 | 7 | OOM |" in text
    assert "| stage2 | none | 2 | 6 | 0.75 | 1.50 | 75 % | 400 | 400 | 200 | 600 | 30.00 |" in text
    assert "**Recommended with 2 camera(s): stage2, recompute none, 2 camera(s), batch 6.**" in text
    assert (
        "| none | 1 | 4 | 1.25x | 1.25x | 0.80x | +0.00 GB | +0.00 GB | 50 % of the gap |" in text
    )
    assert "stage2 makes 1.25 times the samples/s of stage3" in text
    tables = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert set(tables) == {13, 10}
    assert "batch 1: failed, rank 0: ValueError: no kernel" in text
    values = json.loads((settings.out / "matrix.json").read_text())
    assert len(values["cells"]) == len(cells)
    assert values["recommendations"][0]["cell"] == "stage2-recompute_none-cameras_1-batch_6"
    assert (settings.out / "matrix.png").read_bytes().startswith(b"\x89PNG")


def test_report_of_a_matrix_in_which_nothing_ran(run_file, settings):
    cells = run_matrix(run_file, [], settings, lambda *_: Outcome("failed", "all wrong"))
    text = write_report(cells, settings, memory_share=0.8)
    assert "**Recommended with 1 camera(s): nothing.** none of the 2 cells ran." in text
    assert (settings.out / "matrix.png").exists()


def test_a_cell_is_read_as_it_was_written(tmp_path):
    written = cell("stage2", 4, 20.0, settings={"train.adam": [1, 2]})
    written.write(tmp_path)
    assert Cell.read(tmp_path) == written
    assert Cell.read(tmp_path / "none") is None
