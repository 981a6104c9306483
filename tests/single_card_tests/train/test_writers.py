"""The writers of logging.report_to.

Guarantees: the real packages get every number of a line, under a grouped name; VisualDL and
TensorBoard show it during the run; a resumed run has every step once, in W&B and SwanLab under its
id, which a run from step 0 does not have; they get settings and git state, and nothing that a rank
prints, and are told when it fails; metrics.csv has a row per line; foreign files stay; a missing
package is named with its pip extra, and nothing is removed then.

W&B and SwanLab run offline, where their packages are installed; the heavy test installs them into
an environment of its own.
"""

import csv
import json
import signal
import struct
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
MODULES = {
    "tensorboard": "tensorboardX",
    "visualdl": "visualdl",
    "wandb": "wandb",
    "swanlab": "swanlab",
}
# As in run.json.
ENTRY = {
    "settings": {"train": {"learning_rate": 1e-4}},
    "git": {"revision": "0123abc", "is_dirty": True},
    "fleet": None,
}


def records(folder: Path, pattern: str) -> Iterator[bytes]:
    """Records of the service's files, which are LevelDB's logs behind a header of 7 bytes."""
    for file in sorted(folder.glob(pattern)):
        data, place, whole = file.read_bytes(), 7, b""
        while place < len(data):
            if (left := 32768 - place % 32768) < 7:
                place += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, place)
            whole += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):
                yield whole
                whole = b""


def read_wandb(folder: Path) -> tuple[set[str], list, dict[str, Any]]:
    """Ids, numbers and config of all starts."""
    from wandb.proto.wandb_internal_pb2 import Record

    ids, found, config = set(), [], {}
    for data in records(folder, "*-run-*/*.wandb"):
        record = Record.FromString(data)
        if record.HasField("run"):
            ids.add(record.run.run_id)
            updates = record.run.config.update
            config |= {each.key: json.loads(each.value_json) for each in updates}
        items = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        step = items.get("_step")
        found += [(tag, step, value) for tag, value in items.items() if tag[0] != "_"]
    return ids, sorted(found), config


def read_swanlab(folder: Path) -> tuple[set[str], list, dict[str, Any]]:
    """Ids, numbers and config of all starts."""
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    ids, found = set(), []
    for data in records(folder, "run-*/*.swanlab"):
        record = Record.FromString(data)
        # Nothing that a rank prints.
        assert not record.HasField("log")
        if record.HasField("start"):
            ids.add(record.start.id)
        if record.HasField("scalar"):
            scalar = record.scalar
            found.append((scalar.key, scalar.step, scalar.value.number))
    files = sorted(folder.glob("*/files/config.yaml"))
    config = yaml.safe_load(files[-1].read_text())
    return ids, sorted(found), {key: each["value"] for key, each in config.items()}


def ends(name: str, folder: Path) -> list[bool]:
    """Whether each start has told its service that it went well."""
    if name == "wandb":
        from wandb.proto.wandb_internal_pb2 import Record

        found = map(Record.FromString, records(folder, "*-run-*/*.wandb"))
        return [one.exit.exit_code == 0 for one in found if one.HasField("exit")]
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    found = map(Record.FromString, records(folder, "run-*/*.swanlab"))
    return [not one.finish.error for one in found if one.HasField("finish")]


SERVICES = {"wandb": read_wandb, "swanlab": read_swanlab}


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


@pytest.mark.parametrize("name", [*SERVICES])
def test_service_keeps_the_id_of_a_run_that_goes_on(tmp_path, monkeypatch, name):
    pytest.importorskip(name)
    monkeypatch.setenv(f"{name.upper()}_MODE", "offline")
    output_dir = tmp_path / "doors"
    before = signal.getsignal(signal.SIGINT)
    (first,) = open_writers([name], Start(output_dir, ENTRY))
    # Ctrl-C is the run's.
    assert signal.getsignal(signal.SIGINT) is before
    print("a secret row")
    for line in [*LINES, {"step": 4, "loss": 9.0}]:
        first.write(line)
    first.close()
    (second,) = open_writers([name], Start(output_dir, ENTRY, LINES[:2], last_step=4))
    for line in [LINES[2], {"step": 4, "loss": 9.0}, {"step": 5, "loss": 8.0}]:
        second.write(line)
    second.close()
    last = [("train/loss", 4, 9.0), ("train/loss", 5, 8.0)]
    ids, found, config = SERVICES[name](output_dir / name)
    assert found == close(sorted([*WRITTEN, *last]))
    assert len(ids) == 1
    assert config["train"] == ENTRY["settings"]["train"]
    assert config["start"] == {"git": ENTRY["git"]}
    for file in output_dir.rglob("*"):
        assert file.is_dir() or b"secret row" not in file.read_bytes(), file
    # From step 0 it is another run, which has the folder now; it fails.
    (fresh,) = open_writers([name], Start(output_dir, ENTRY))
    try:
        raise ValueError("no such sample")
    except ValueError:
        fresh.close()
    assert sorted(ends(name, output_dir / name)) == [False, True, True]
    assert (output_dir / name / "run_id").read_text() not in ids


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
    assert "3 passed" in done.stdout


def test_service_that_does_not_start_says_how_it_would(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", lambda **given: 1 / 0)
    with pytest.raises(ValueError, match="division by zero.*wandb login.*WANDB_MODE=offline"):
        open_writers(["wandb"], Start(tmp_path))


class StandIn(ServiceRun):
    package = "standin"

    def _finish(self, error):
        self.run.finish()


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
        ("loss", "train/loss"),
        ("MSE", "train/MSE"),
        ("eval_MSE", "eval/MSE"),
        ("grad_norm", "train/grad_norm"),
        ("skipped_updates", "train/skipped_updates"),
        ("step_seconds_max", "speed/step_seconds_max"),
        ("mfu", "speed/mfu"),
        ("tokens_per_expert_min", "experts/tokens_per_expert_min"),
        ("sequence_length_mean", "data/sequence_length_mean"),
        ("skipped_samples", "data/skipped_samples"),
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
