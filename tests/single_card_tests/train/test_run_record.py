"""run.json: an entry for every start, its command and revision."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import paddle
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.config.schema import RunConfig
from paddle_vl.parallel.launcher import COMMAND_VARIABLE
from paddle_vl.train.reporting.run_files import RUN_FILE, read_starts
from paddle_vl.train.reporting.run_record import (
    RunRecord,
    git_state,
    overrides_in,
    start_command,
    start_entry,
)


@pytest.fixture
def config(tmp_path) -> RunConfig:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {config: {}}\ndata: {train: [a.jsonl], processor: p}\n"
        "train: {output_dir: out, max_steps: 4, learning_rate: 0.1}\n"
    )
    degrees = ["parallel.dp_degree=2", "parallel.sharding_degree=2"]
    return load_run_config(file, degrees)


def commit(folder: Path) -> str:
    """Make the folder a repository with one file; return its revision."""
    (folder / "file").write_text("one")
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    for command in (["init", "-q"], ["add", "file"], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True)
    return found.stdout.strip()


def test_every_start_has_an_entry_that_its_end_closes(tmp_path, config):
    record = RunRecord(tmp_path)
    record.start(config, 0)
    (entry,) = read_starts(tmp_path)
    assert (entry["ended"], entry["last_step"]) == (None, None)
    record.end(2)
    record.start(config, 2)
    first, second = read_starts(tmp_path)
    assert first == entry | {"ended": first["ended"], "last_step": 2}
    assert first["started"] <= first["ended"] <= second["started"]
    assert (second["first_step"], second["ended"]) == (2, None)
    assert [path.name for path in tmp_path.glob("run*")] == ["run.json", "run.yaml"]


def test_entry_says_from_what_and_with_what(tmp_path, config, monkeypatch):
    revision = commit(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["paddle-vl", "train", "run.yaml", "--nproc", "4", "parallel.dp_degree=2"]
    monkeypatch.setattr(sys, "argv", command)
    entry = start_entry(config, 3)
    assert entry["git"] == {"revision": revision, "is_dirty": False}
    assert (entry["command"], entry["overrides"]) == (command, command[-1:])
    assert (entry["num_processes"], entry["parallel"]["sharding_degree"]) == (4, 2)
    assert entry["overlaps"]["sharding_gather_overlap"] == [False, "not on a CPU"]
    assert entry["CUDA_DEVICE_MAX_CONNECTIONS"] == os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    assert entry["versions"]["numpy"] == numpy.__version__
    assert (entry["device"], entry["folder"]) == (paddle.get_device(), str(tmp_path))
    assert entry["device_name"]
    assert entry["host"]
    assert json.loads(json.dumps(entry)) == entry


@pytest.mark.parametrize(
    ("argv", "variables", "started"),
    [
        (["/bin/paddle-vl", "train", "a b"], {}, ["/bin/paddle-vl", "train", "a b"]),
        (["/x/paddle_vl/__main__.py", "train"], {}, [sys.executable, "-m", "paddle_vl", "train"]),
        (["tools/train.py", "a"], {}, [sys.executable, "tools/train.py", "a"]),
        (
            ["/x/paddle_vl/__main__.py", "train", "a", "parallel.dp_degree=2"],
            {COMMAND_VARIABLE: '["/bin/paddle-vl", "train", "a", "--nproc", "2"]'},
            ["/bin/paddle-vl", "train", "a", "--nproc", "2"],
        ),
        (
            ["tools/train.py", "a"],
            {"PADDLE_TRAINERS_NUM": "16", "PADDLE_NNODES": "2", "PADDLE_LOCAL_SIZE": "8"},
            ["fleetrun", "--nnodes", "2", "--nproc_per_node", "8", "tools/train.py", "a"],
        ),
    ],
)
def test_recorded_command_starts_the_run_again(monkeypatch, argv, variables, started):
    monkeypatch.setattr(sys, "argv", argv)
    assert start_command(variables) == started


def test_overrides_are_the_settings_of_a_command():
    arguments = ["a/b.yaml", "train.seed=3", "--out=x", "model.x", "data.train=[a=b]", "odd=1"]
    assert overrides_in(arguments) == ["train.seed=3", "data.train=[a=b]"]


def test_a_revision_is_that_of_a_tracked_file_and_of_its_changes(tmp_path, monkeypatch):
    assert git_state(tmp_path) is None
    revision = commit(tmp_path)
    assert git_state(tmp_path, of=tmp_path / "file") is not None
    (tmp_path / "installed.py").write_text("")
    assert git_state(tmp_path, of=tmp_path / "installed.py") is None
    (tmp_path / "runs").mkdir()
    assert git_state(tmp_path / "runs") == {"revision": revision, "is_dirty": False}
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path) == {"revision": revision, "is_dirty": True}
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"starts": 3}', '{"starts": [3]}'])
def test_damaged_file_is_named(tmp_path, text):
    (tmp_path / RUN_FILE).write_text(text)
    with pytest.raises(RuntimeError, match=r"run\.json.*mend it, or move it away"):
        read_starts(tmp_path)
