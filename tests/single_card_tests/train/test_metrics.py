"""Metrics of a run.

Guarantees: means are weighted by target tokens and leave out skipped updates; values of all ranks
keep their names, and speed is that of the slowest rank; a report copies nothing from the
host to the device; a checkpoint keeps the window; lines beyond the resumed step are dropped, also
incomplete ones; the loss curve is a PNG.
"""

import json
import math
from dataclasses import replace

import numpy as np
import paddle
import pytest
from PIL import Image

from paddle_vl.batch.schema import HostBatch
from paddle_vl.families.vlm.training.objective import VLLoss
from paddle_vl.train.reporting.metrics import StepMeter
from paddle_vl.train.reporting.plots import draw_loss_curve
from paddle_vl.train.reporting.reporter import by_rank, packed
from paddle_vl.train.reporting.run_files import MetricsFile
from tests.single_card_tests.train.batches import outcome

EMPTY = HostBatch()


def gathered(*ranks: dict) -> dict:
    """Several ranks' values by name."""
    return by_rank(np.stack([packed(values).numpy() for values in ranks]), ranks[0])


def report(*meters: StepMeter) -> dict:
    """A metrics line from several ranks' meters, without times."""
    values = gathered(*(meter.values(counts_data=True) for meter in meters))
    return meters[0].line(values)


def test_report_weighs_by_targets_and_leaves_skipped_updates_out():
    meter = StepMeter(VLLoss())
    meter.add(outcome(2.0, 1.0, 10, 100), [], 0.5)
    meter.add(outcome(math.nan, math.nan, 50, 100, is_good=False), [], 0.5, data_wait_s=0.3)
    meter.add(outcome(4.0, 3.0, 30, 200), [], 1.0)
    assert report(meter) == {
        "loss": 3.5,
        "grad_norm": 3.0,
        "samples_per_second": 3.0,
        "tokens_per_second": 200.0,
        "step_seconds": 0.6667,
        "step_seconds_max": 0.6667,
        "data_wait_seconds": 0.1,
        "target_tokens": 40,
        "skipped_updates": 1,
    }
    meter.add(outcome(math.inf, math.nan, 10, 10, is_good=False), [], 1.0)
    line = report(meter)
    assert (line["loss"], line["grad_norm"], line["skipped_updates"]) == (None, None, 2)


def test_values_come_together_without_a_copy_from_the_host(monkeypatch):
    meter = StepMeter(VLLoss())
    meter.add(outcome(2.0, 1.0, 10, 100), [], 0.1 + 0.2)

    def refuse(*arguments, **named):
        raise AssertionError("a copy to the device, which waits for it")

    monkeypatch.setattr(paddle, "to_tensor", refuse)
    assert gathered(meter.values(counts_data=True))["seconds"] == 0.1 + 0.2


def test_speed_is_the_slowest_processes_and_lengths_are_of_all_samples():
    slow, fast = StepMeter(VLLoss()), StepMeter(VLLoss())
    for meter, seconds, lengths in ((slow, 2.0, [[5, 9]]), (fast, 1.0, [[3], [7, 4]])):
        batches = [replace(EMPTY, lengths=tuple(of_batch)) for of_batch in lengths]
        meter.add(outcome(2.0, 1.0, 10, 100), batches, seconds)
    line = report(slow, fast)
    assert line["tokens_per_second"] == 50.0
    assert (line["step_seconds"], line["step_seconds_max"]) == (1.5, 2.0)
    lengths = [line[f"sequence_length_{name}"] for name in ("min", "mean", "max")]
    assert lengths == [3, 5.6, 9]


def test_mfu_is_the_models_operations_in_what_all_devices_can_do():
    one, other = StepMeter(VLLoss(), peak_flops=5e9), StepMeter(VLLoss(), peak_flops=3e9)
    batches = [replace(EMPTY, flops=2 * 10**9), replace(EMPTY, flops=10**9)]
    for meter in (one, other):
        meter.add(outcome(2.0, 1.0, 10, 100), batches, 3.0)
    assert report(one, other)["mfu"] == round(6 / (3 * 8), 4)
    unknown = StepMeter(VLLoss())
    unknown.add(outcome(2.0, 1.0, 10, 100), batches, 3.0)
    assert "mfu" not in report(unknown)


def test_longest_row_of_skipped_updates_begins_anew_with_a_report_but_not_the_row_itself():
    meter, longest = StepMeter(VLLoss()), []
    for good in (False, False, True, False, None, False, False, None, True, None):
        if good is None:
            longest.append(gathered(meter.values(counts_data=True))["skips"][0][2])
        else:
            meter.add(outcome(1.0, 1.0, 1, 1, is_good=good), [], 1.0)
    assert longest == [2, 3, 0]


def test_packing_efficiency_is_the_share_of_real_tokens_since_the_last_line():
    meter = StepMeter(VLLoss())
    meter.add(outcome(2.0, 1.0, 10, 100, num_packed_places=110), [], 1.0)
    meter.add(outcome(2.0, 1.0, 10, 80, num_packed_places=90), [], 1.0)
    assert report(meter)["packing_efficiency"] == 0.9
    meter.add(outcome(2.0, 1.0, 10, 50, num_packed_places=100), [], 1.0)
    assert report(meter)["packing_efficiency"] == 0.5


def test_window_survives_a_checkpoint():
    meter, resumed = StepMeter(VLLoss()), StepMeter(VLLoss())
    meter.add(outcome(2.0, 1.0, 10, 1), [], 1.0)
    meter.add(outcome(2.0, 1.0, 10, 1, is_good=False), [], 1.0)
    resumed.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    assert resumed.skipped_in_a_row == 1
    for each in (meter, resumed):
        each.add(outcome(5.0, 1.0, 20, 1), [], 1.0)
    lines = [report(meter), report(resumed)]
    assert [line["loss"] for line in lines] == [4.0, 4.0]
    assert [line["skipped_updates"] for line in lines] == [1, 1]


def test_values_of_all_ranks_keep_names_and_shapes():
    numbers_PK = np.random.default_rng(0).normal(size=(4, 4))
    ranks = [
        {"one": row[0], "pair": paddle.to_tensor(row[1:3]), "other": row[3]} for row in numbers_PK
    ]
    found = gathered(*ranks)
    np.testing.assert_array_equal(found["one"], numbers_PK[:, 0])
    np.testing.assert_array_equal(found["pair"], numbers_PK[:, 1:3])
    np.testing.assert_array_equal(found["other"], numbers_PK[:, 3])


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
