"""A matrix over simulated cells, and its report.

Guarantees: every choice is tried up to its largest fitting batch; finished cells are not run again,
but cells that failed or ran out of time, or whose settings or model configuration changed are; a
cell that fails for another reason ends only its row and is reported with its error, never as out of
memory; choices that do not fit the number of ranks are refused before any cell; the command of a
cell contains all its settings; the report has a row for every cell, the recommendation and a plot.
"""

import json
import logging
from dataclasses import replace

import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.processes import Limits
from paddle_vl.profile import matrix
from paddle_vl.profile.cell_runs import CellOutcome
from paddle_vl.profile.cells import Cell, Growth, MatrixChoice
from paddle_vl.profile.matrix import MatrixSettings, all_choices, run_matrix
from paddle_vl.profile.matrix_report import write_report
from paddle_vl.profile.workload import Workload
from tests.single_card_tests.profile.measures import cell
from tests.single_card_tests.profile.pretended_cells import Pretended, matrix_settings, with_profile
from tests.single_card_tests.train.tiny_run import write_tiny_run


@pytest.fixture
def run_file(tmp_path):
    return str(write_tiny_run(tmp_path / "run"))


@pytest.fixture
def settings(tmp_path):
    return matrix_settings(tmp_path / "matrix")


def one_cell(settings: MatrixSettings) -> MatrixSettings:
    return replace(settings, choices=[MatrixChoice("dp", "none", 1)], growth=Growth(sizes=[1]))


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
    one = one_cell(settings)
    run_matrix(run_file, [], one, Pretended())
    changed = Pretended()
    with caplog.at_level(logging.INFO, "paddle_vl"):
        longer = replace(with_profile(one, **change), seconds=31.0)
        run_matrix(run_file, overrides, longer, changed)
    assert changed.ran == [("dp", 1)]
    assert f"runs again: {told}" in caplog.text


def test_a_changed_model_file_and_changed_flags_of_paddle_are_noticed(
    run_file, settings, tmp_path, monkeypatch
):
    one = one_cell(settings)
    file = tmp_path / "config.json"
    values = load_run_config(run_file).model_dump()["model"]["config"]

    def ran() -> list[tuple[str, int]]:
        run = Pretended()
        run_matrix(run_file, [f"model.config={file}"], one, run)
        return run.ran

    file.write_text(json.dumps(values))
    assert ran() == [("dp", 1)]
    assert ran() == []
    file.write_text(json.dumps(values | {"tie_word_embeddings": False}))
    assert ran() == [("dp", 1)]
    monkeypatch.setenv("FLAGS_use_virtual_memory_auto_growth", "0")
    assert ran() == [("dp", 1)]


@pytest.mark.parametrize(
    "failure",
    [
        CellOutcome("failed", "rank 1: ValueError: no kernel"),
        CellOutcome("timeout", "not done after 30 s"),
    ],
)
def test_a_failure_ends_its_line_only_and_is_tried_again(run_file, settings, failure):
    cells = run_matrix(run_file, [], settings, Pretended({"dp": failure}))
    assert (cells[0].status, cells[0].detail) == failure
    assert {c.choice.sharding: c.status for c in cells} == {"dp": failure.status, "stage2": "oom"}
    again = Pretended()
    run_matrix(run_file, [], settings, again)
    assert again.ran == [("dp", size) for size in (1, 2, 4, 3)]


def test_a_cell_that_ends_well_without_a_profile_has_failed(run_file, settings):
    cells = run_matrix(run_file, [], settings, lambda *_: CellOutcome("ok"))
    assert [(c.status, c.detail) for c in cells] == [("failed", "ended well without a profile")] * 2


@pytest.mark.parametrize(
    ("choice", "processes", "message"),
    [
        (MatrixChoice("stage2", "none"), 1, "sharding choice dp with 1 process"),
        (MatrixChoice("none", "none"), 2, "sharding choice none with 2 process"),
        (MatrixChoice("dp", "some"), 2, "train.recompute"),
    ],
)
def test_choices_that_do_not_fit_are_refused_before_any_cell(
    run_file, settings, choice, processes, message
):
    refused = replace(
        settings, choices=[MatrixChoice("dp", "none"), choice], num_processes=processes
    )
    run = Pretended()
    with pytest.raises(ValueError, match=message):
        run_matrix(run_file, [], refused, run)
    assert run.ran == []


def test_a_matrix_on_a_cpu_needs_a_limit(run_file, settings):
    with pytest.raises(ValueError, match="--memory-limit-gb"):
        run_matrix(run_file, [], with_profile(settings, memory_limit_gb=None), Pretended())


def test_a_gpus_memory_is_not_watched_from_outside(settings, monkeypatch):
    assert settings.limits == Limits(30.0, 2_000_000_000)
    monkeypatch.setattr(matrix.paddle, "get_device", lambda: "gpu:0")
    assert settings.limits == Limits(30.0, None)
    assert with_profile(settings, memory_limit_gb=None).limits == Limits(30.0, None)


def test_mp_processes_share_samples(run_file):
    config = load_run_config(run_file, ["parallel.mp_degree=2"])
    given = MatrixChoice("stage3", "full", 2).overrides(config, 4, 8)
    assert given == [
        "parallel.dp_degree=1", "parallel.sharding_degree=2", "train.recompute=full",
        "train.per_device_train_batch_size=8", "parallel.sharding_stage=3",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="3 processes do not divide"):
        MatrixChoice("dp", "none").overrides(config, 3, 8)


def test_the_command_of_a_cell_says_all_that_concerns_it(run_file, settings):
    commands = []

    def keep(arguments, num_ranks, folder, limits, variables):
        commands.append(arguments)
        return CellOutcome("failed", "")

    workload = Workload(True, image_side=64, answer_tokens=7)
    choices = [MatrixChoice("stage3", "full", 2)]
    run_matrix(
        run_file,
        ["train.seed=3"],
        replace(
            with_profile(settings, workload=workload), choices=choices, growth=Growth(sizes=[4])
        ),
        keep,
    )
    options, given = Pretended.parsed(commands[0])
    assert (options.warmup, options.steps, options.cameras) == (1, 2, [2])
    assert (options.synthetic, options.image_side, options.answer_tokens) == (True, 64, 7)
    assert options.memory_limit_gb == 2.0
    assert not options.matrix
    assert given["train.seed"] == "3"
    assert given["train.recompute"] == "full"
    assert given["parallel.sharding_stage"] == "3"


def test_a_damaged_cell_file_is_named(run_file, settings):
    folder = settings.profile.out / "cells" / "dp-recompute_none-cameras_1-batch_1"
    folder.mkdir(parents=True)
    (folder / "cell.json").write_text("{}")
    with pytest.raises(RuntimeError, match=r"cell\.json is not a cell"):
        run_matrix(run_file, [], settings, Pretended())


def test_report_has_all_cells_what_to_take_and_a_plot(run_file, settings):
    shardings = ["dp", "stage2", "stage3"]
    settings = replace(settings, choices=all_choices(shardings, ["none"], [1, 2]))
    broken = Pretended({"dp": CellOutcome("failed", "rank 0: ValueError: no kernel")})
    cells = run_matrix(run_file, [], settings, broken)
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


def test_report_of_a_matrix_in_which_nothing_ran(run_file, settings):
    cells = run_matrix(run_file, [], settings, lambda *_: CellOutcome("failed", "all wrong"))
    text = write_report(cells, settings, memory_share=0.8)
    assert "**Recommended with 1 camera(s): nothing.** none of the 2 cells ran." in text
    assert (settings.profile.out / "matrix.png").exists()


def test_a_cell_is_read_as_it_was_written(tmp_path):
    written = cell("stage2", 4, 20.0, settings={"train.adam": [1, 2]})
    written.write(tmp_path)
    assert Cell.read(tmp_path) == written
    assert Cell.read(tmp_path / "none") is None
