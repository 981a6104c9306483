"""Curves in VisualDL and TensorBoard.

Guarantees: both real packages get every number of a line, under a grouped name, readable during the
run; a resumed run has every step once; foreign files stay; a missing package is named with its pip
extra, and nothing is removed then.
"""

import struct
import sys
import time
from pathlib import Path

import pytest

from paddle_vl.config.schema import LoggingConfig
from paddle_vl.parallel.ranks import ONE_RANK
from paddle_vl.train.reporting.reporter import Reporter, ScalarWriters
from paddle_vl.train.reporting.run_files import METRICS_FILE, MetricsFile, numbers_of, tag_of

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
MODULES = {"tensorboard": "tensorboardX", "visualdl": "visualdl"}


def close(written: list[tuple[str, int, float]]) -> list:
    """Equal up to storage in 32 bits."""
    return [(tag, step, pytest.approx(value, rel=1e-6)) for tag, step, value in written]


@pytest.mark.parametrize("name", [*READERS])
def test_every_number_is_there_while_the_run_goes_on(tmp_path, name):
    pytest.importorskip(MODULES[name])
    writers = ScalarWriters([name], tmp_path)
    for line in LINES:
        writers.write(line)
    deadline = time.monotonic() + 20
    while (found := READERS[name](tmp_path / name)) != close(WRITTEN):
        assert time.monotonic() < deadline, found
    writers.close()


@pytest.mark.parametrize("name", [*READERS])
def test_resumed_run_has_every_step_once(tmp_path, name):
    pytest.importorskip(MODULES[name])
    first = ScalarWriters([name], tmp_path)
    for line in [*LINES, {"step": 4, "loss": 9.0}]:
        first.write(line)
    first.close()
    note = tmp_path / name / "note.txt"
    note.write_text("mine")
    second = ScalarWriters([name], tmp_path, LINES[:2])
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


@pytest.mark.parametrize("name", [*READERS])
def test_absent_writer_names_its_extra_and_removes_nothing(tmp_path, monkeypatch, name):
    file = tmp_path / name / "events.out.tfevents.1"
    file.parent.mkdir()
    file.write_text("")
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    with pytest.raises(ValueError, match=rf"pip install 'paddle-vl\[{name}\]'"):
        ScalarWriters([name], tmp_path)
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
