"""The writers of logging.report_to, read back as the packages wrote them.

W&B and SwanLab run offline, where their packages are installed; the heavy test installs them into
an environment of its own.
"""

import csv
import signal
import struct
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from paddle_vl.config.schema import LoggingConfig
from paddle_vl.parallel.ranks import ONE_RANK
from paddle_vl.train.reporting.reporter import Reporter
from paddle_vl.train.reporting.run_files import METRICS_FILE, MetricsFile, numbers_of, tag_of
from paddle_vl.train.reporting.writers.base import Start, open_writers
from paddle_vl.train.reporting.writers.service import ServiceRun

LINES = [
    {"step": 1, "loss": 0.5, "grad_norm": None, "tokens_per_second": 100.0, "epoch": 1},
    {"step": 2, "loss": 0.25, "learning_rate/mergers": 1e-3, "loader": "a", "new": {"x": 2}},
    {"step": 3, "eval_loss": 0.75, "memory_gb": 1.5},
]
WRITTEN = [
    ("data/epoch", 1, 1.0),
    ("eval/loss", 3, 0.75),
    ("memory/memory_gb", 3, 1.5),
    ("other/new/x", 2, 2.0),
    ("speed/tokens_per_second", 1, 100.0),
    ("train/learning_rate/mergers", 2, 1e-3),
    ("train/loss", 1, 0.5),
    ("train/loss", 2, 0.25),
]


def read_tensorboard(folder: Path) -> list[tuple[str, int, float]]:
    """Records of a length, its checksum, an event and the event's checksum."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for file in folder.glob("events.*"):
        data, place = file.read_bytes(), 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            event = event_pb2.Event.FromString(data[place + 12 : place + 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            place += length + 16
    return sorted(found)


def read_visualdl(folder: Path) -> list[tuple[str, int, float]]:
    visualdl = pytest.importorskip("visualdl")
    found = []
    for file in folder.glob("vdlrecords.*"):
        reader = visualdl.LogReader(file_path=str(file))
        for tag in reader.get_tags().get("scalar", []):
            found += [(tag, item.id, item.value) for item in reader.get_data("scalar", tag)]
    return sorted(found)


READERS = {"tensorboard": read_tensorboard, "visualdl": read_visualdl}
MODULES = {"tensorboard": "tensorboardX"} | {n: n for n in ("visualdl", "wandb", "swanlab")}
# As in run.json.
ENTRY = {
    "settings": {"train": {"learning_rate": 1e-4}},
    "git": {"revision": "0123abc", "is_dirty": True},
    "fleet": None,
}


def close(written: list[tuple[str, int, float]]) -> list:
    """Equal up to storage in 32 bits."""
    return [(tag, step, pytest.approx(value, rel=1e-6)) for tag, step, value in written]


@pytest.mark.parametrize("name", [*READERS])
def test_every_number_is_there_while_the_run_goes_on(tmp_path, name):
    pytest.importorskip(MODULES[name])
    (writer,) = open_writers([name], Start(tmp_path))
    for line in LINES:
        writer.write(line)
    deadline = time.monotonic() + 20
    while (found := READERS[name](tmp_path / name)) != close(WRITTEN):
        assert time.monotonic() < deadline, found
    writer.close()


@pytest.mark.parametrize("name", [*READERS])
def test_resumed_run_has_every_step_once(tmp_path, name):
    pytest.importorskip(MODULES[name])
    (first,) = open_writers([name], Start(tmp_path))
    for line in [*LINES, {"step": 4, "loss": 9.0}]:
        first.write(line)
    first.close()
    note = tmp_path / name / "note.txt"
    note.write_text("mine")
    (second,) = open_writers([name], Start(tmp_path, lines=LINES[:2]))
    second.write(LINES[2])
    second.close()
    assert READERS[name](tmp_path / name) == close(WRITTEN)
    assert note.read_text() == "mine"


def test_run_that_goes_on_gives_its_writers_the_lines_it_keeps(tmp_path):
    pytest.importorskip("tensorboardX")
    file = MetricsFile(tmp_path / METRICS_FILE)
    for line in [*LINES, {"step": 4, "loss": 9.0}]:
        file.append(line)
    config = LoggingConfig(report_to=["tensorboard"], progress_bar=False)
    reporter = Reporter(config, tmp_path, ONE_RANK)
    reporter.open(3, 10)
    reporter.write(5, {"eval_loss": 0.5})
    reporter.close()
    expected = sorted([*WRITTEN, ("eval/loss", 5, 0.5)])
    assert read_tensorboard(tmp_path / "tensorboard") == close(expected)


class StandIn(ServiceRun):
    package = "standin"

    def _finish(self, error):
        """Nothing to tell."""


def test_service_keeps_the_id_of_a_run_that_goes_on(tmp_path):
    given, logged = [], []

    def log(values, step):
        logged.extend((tag, step, value) for tag, value in values.items())

    def started(*start, lines, **settings):
        run = SimpleNamespace(log=log)
        writer = StandIn(
            Start(tmp_path / "doors", ENTRY, *start, **settings),
            lambda **told: given.append(told) or run,
            dict,
        )
        for line in lines:
            writer.write(line)

    started(lines=[*LINES, {"step": 4, "loss": 9.0}])
    lines = [LINES[2], {"step": 4, "loss": 9.0}, {"step": 5, "loss": 8.0}]
    started(LINES[:2], last_step=4, lines=lines)
    last = [("train/loss", 4, 9.0), ("train/loss", 5, 8.0)]
    assert sorted(logged) == sorted([*WRITTEN, *last])
    # From step 0 it is another run, which has the folder now.
    started(lines=[])
    ids = [told["id"] for told in given]
    assert ids[0] == ids[1] != ids[2] == (tmp_path / "doors/standin/run_id").read_text()
    config = {**ENTRY["settings"], "start": {"git": ENTRY["git"]}}
    assert given[0] == {
        "project": "paddle-vl", "name": "doors", "id": ids[0], "resume": "allow", "config": config,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_real_service_takes_every_number_and_nothing_printed(tmp_path, monkeypatch, name):
    pytest.importorskip(name)
    monkeypatch.setenv(f"{name.upper()}_MODE", "offline")
    before = signal.getsignal(signal.SIGINT)
    for fails in (False, True):
        (writer,) = open_writers([name], Start(tmp_path, ENTRY))
        # Ctrl-C is the run's.
        assert signal.getsignal(signal.SIGINT) is before
        print("a secret row")
        for line in LINES:
            writer.write(line)
        try:
            assert not fails
        except AssertionError:
            writer.close()
        else:
            writer.close()
    data = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert not [tag for tag, *_ in WRITTEN if tag.encode() not in data]
    assert b"secret row" not in data


@pytest.mark.heavy
def test_services_in_an_environment_of_their_own(tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "swanlab>=0.10", "wandb>=0.22"]
    if (done := subprocess.run(install, capture_output=True, text=True)).returncode != 0:
        pytest.skip(f"no packages can be installed here: {done.stderr[-300:]}")
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    assert not (packages / "torch").exists()
    # The packages of this environment come behind those of the new one.
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    tests = [python, "-m", "pytest", "-q", "-k", "service and not environment", __file__]
    done = subprocess.run(tests, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


def test_service_that_does_not_start_says_how_it_would(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", lambda **given: 1 / 0)
    with pytest.raises(ValueError, match="division by zero.*wandb login.*WANDB_MODE=offline"):
        open_writers(["wandb"], Start(tmp_path))


def test_ctrl_c_stays_the_runs_in_any_thread(tmp_path):
    def init(**given):
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    before = signal.getsignal(signal.SIGINT)
    StandIn(Start(tmp_path), init, dict)
    assert signal.getsignal(signal.SIGINT) is before
    with ThreadPoolExecutor(1) as threads:
        threads.submit(StandIn, Start(tmp_path), init, dict).result()


def test_csv_has_a_row_per_line_and_columns_that_come_later(tmp_path):
    for lines, written in ((LINES[:1], LINES[1:]), (LINES[:2], LINES[2:])):
        (writer,) = open_writers(["csv"], Start(tmp_path, lines=lines))
        for line in written:
            writer.write(line)
        writer.close()
    with (tmp_path / "metrics.csv").open(newline="") as stream:
        first, second, third = csv.DictReader(stream)
    assert [row["step"] for row in (first, second, third)] == ["1", "2", "3"]
    assert first["loss"] == "0.5"
    assert first["new/x"] == ""
    assert second["new/x"] == "2"
    assert third["eval_loss"] == "0.75"


@pytest.mark.parametrize("name", [*MODULES])
def test_absent_writer_names_its_extra_and_removes_nothing(tmp_path, monkeypatch, name):
    file = tmp_path / name / "events.out.tfevents.1"
    file.parent.mkdir()
    file.write_text("")
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    with pytest.raises(ValueError, match=rf"pip install 'paddle-vl\[{name}\]'"):
        open_writers([name], Start(tmp_path))
    assert file.exists()


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        ("MSE", "train/MSE"),
        ("eval_MSE", "eval/MSE"),
        ("step_seconds_max", "speed/step_seconds_max"),
        ("tokens_per_expert_min", "experts/tokens_per_expert_min"),
        ("packing_efficiency", "data/packing_efficiency"),
        ("never_seen", "other/never_seen"),
    ],
)
def test_names_are_grouped(key, tag):
    assert tag_of(key) == tag


def test_numbers_of_a_line_are_all_but_step_texts_lists_and_truths():
    line = {"step": 3, "a": 1, "b": {"c": 2.5, "d": {"e": None}}, "f": "x", "g": [1], "h": True}
    line["i"] = float("inf")
    assert dict(numbers_of(line)) == {"a": 1, "b/c": 2.5, "b/d/e": None, "i": None}
