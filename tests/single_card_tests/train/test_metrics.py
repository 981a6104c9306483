"""What a run reports.

Guarantees: means are weighted by target tokens and leave skipped updates out; the window survives a
checkpoint; lines beyond the resumed step are dropped, torn ones too; the curve is a PNG; a writer
whose package is absent names its pip extra.
"""

import json
import math
import sys

import pytest
from PIL import Image

from paddle_vl.train.loss_curve import draw_loss_curve
from paddle_vl.train.metrics import StepMeter
from paddle_vl.train.metrics_file import MetricsFile
from paddle_vl.train.scalar_writers import ScalarWriters
from tests.single_card_tests.train.batches import step_result


def test_report_weighs_by_targets_and_leaves_skipped_updates_out():
    meter = StepMeter()
    meter.add(step_result(2.0, 1.0, 10, 100, False), 0.5)
    meter.add(step_result(math.nan, math.nan, 50, 100, True), 0.5)
    meter.add(step_result(4.0, 3.0, 30, 200, False), 1.0)
    assert meter.report() == {
        "loss": 3.5,
        "grad_norm": 3.0,
        "samples_per_second": 3.0,
        "tokens_per_second": 200.0,
        "target_tokens": 40,
        "skipped_updates": 1,
    }
    meter.add(step_result(math.inf, math.nan, 10, 10, True), 1.0)
    line = meter.report()
    assert (line["loss"], line["grad_norm"], line["skipped_updates"]) == (None, None, 2)


def test_packing_efficiency_is_the_share_of_real_tokens_since_the_last_line():
    meter = StepMeter()
    meter.add(step_result(2.0, 1.0, 10, 100, False, 110), 1.0)
    meter.add(step_result(2.0, 1.0, 10, 80, False, 90), 1.0)
    assert meter.report()["packing_efficiency"] == 0.9
    meter.add(step_result(2.0, 1.0, 10, 50, False, 100), 1.0)
    assert meter.report()["packing_efficiency"] == 0.5


def test_window_survives_a_checkpoint():
    meter, resumed = StepMeter(), StepMeter()
    meter.add(step_result(2.0, 1.0, 10, 1, False), 1.0)
    resumed.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    for each in (meter, resumed):
        each.add(step_result(5.0, 1.0, 20, 1, False), 1.0)
    assert resumed.report()["loss"] == meter.report()["loss"] == 4.0


def test_lines_after_a_step_are_dropped_and_a_torn_one_too(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        metrics.append({"step": step, "loss": step / 10})
    with metrics.path.open("a") as stream:
        stream.write('{"step": 4, "lo')
    assert [line["step"] for line in metrics.read()] == [1, 2, 3]
    metrics.drop_after(2)
    assert metrics.path.read_text() == '{"step": 1, "loss": 0.1}\n{"step": 2, "loss": 0.2}\n'


@pytest.mark.parametrize("broken", ['{"st', "[2]", '{"loss": 0.5}', '{"step": "2"}'])
def test_broken_line_in_the_middle_is_reported(tmp_path, broken):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.path.write_text('{"step": 1}\n' + broken + '\n{"step": 3}\n')
    with pytest.raises(RuntimeError, match=r"metrics\.jsonl:2 is not a metrics line"):
        metrics.read()


@pytest.mark.parametrize("lines", [[], [{"step": 1, "loss": 2.0}, {"step": 2, "eval_loss": 1.0}]])
def test_curve_is_a_picture(tmp_path, lines):
    draw_loss_curve(lines, tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.size == (1280, 800)


@pytest.mark.parametrize(
    ("name", "module"), [("visualdl", "visualdl"), ("tensorboard", "tensorboardX")]
)
def test_absent_writer_names_its_extra(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"pip install 'paddle-vl\[{name}\]'"):
        ScalarWriters([name], tmp_path)


def test_writers_get_every_number(tmp_path, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, logdir):
            assert logdir == str(tmp_path / "tensorboard")

        def add_scalar(self, *scalar):
            written.append(scalar)

        def close(self):
            written.append("closed")

    module = type(sys)("tensorboardX")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    writers = ScalarWriters(["tensorboard"], tmp_path)
    writers.write({"step": 3, "loss": 0.5, "grad_norm": None})
    writers.close()
    assert written == [("loss", 0.5, 3), "closed"]
