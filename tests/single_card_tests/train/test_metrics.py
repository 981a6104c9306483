"""Metrics of a run, over steps and ranks, and what a report tells of unequal ranks.

Ranks that take turns in having most tokens are seen, since they are compared within each step.
"""

import math
from dataclasses import replace

import numpy as np
import paddle
import pytest

from paddle_vl.batch.schema import HostBatch
from paddle_vl.config.load import load_run_config
from paddle_vl.families.pi07.objective import with_lengths
from paddle_vl.families.pi07.prefix import presence_of
from paddle_vl.families.vlm.training.objective import VLLoss
from paddle_vl.report.panels import panels_of
from paddle_vl.report.runs import read_runs
from paddle_vl.report.summary import tables_of
from paddle_vl.train.build import build_trainer
from paddle_vl.train.reporting.metrics import StepMeter
from paddle_vl.train.reporting.reporter import by_rank, packed
from paddle_vl.train.reporting.run_files import MetricsFile
from tests.single_card_tests.report.run_folders import LINES, write_run
from tests.single_card_tests.train.batches import outcome
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run

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


def test_values_of_all_ranks_keep_names_and_shapes_without_a_copy_from_the_host(monkeypatch):
    numbers_PK = np.random.default_rng(0).normal(size=(4, 4))
    ranks = [
        {"one": row[0], "pair": paddle.to_tensor(row[1:3]), "other": row[3]} for row in numbers_PK
    ]

    def refuse(*arguments, **named):
        raise AssertionError("a copy to the device, which waits for it")

    monkeypatch.setattr(paddle, "to_tensor", refuse)
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


def line_of(*ranks: tuple[bool, list[list[tuple[int, ...]]]]) -> dict:
    """A metrics line.

    Args:
        ranks: whether each counts data, and the lengths in each micro-batch of each of its steps.
    """
    values = []
    for counts_data, steps in ranks:
        meter = StepMeter(VLLoss())
        for batches in steps:
            micro_batches = [replace(EMPTY, lengths=lengths) for lengths in batches]
            meter.add(outcome(2.0, 1.0, 10, 100), micro_batches, 1.0)
        values.append(meter.values(counts_data))
    return StepMeter(VLLoss()).line(gathered(*values))


def over_ranks(line: dict, key: str) -> list[float]:
    return [line[f"{key}_{name}"] for name in ("sum", "mean", "min", "max")]


# In turn 10 against 2 tokens; two micro-batches in the first step.
ONE, OTHER = [[(6, 2), (2,)], [(1, 1)]], [[(1,), (1,)], [(10,)]]


def test_ranks_are_compared_within_each_step():
    line = line_of((True, ONE), (True, OTHER))
    assert over_ranks(line, "tokens_per_step") == [12.0, 6.0, 2.0, 10.0]
    assert line["token_imbalance"] == round(10 / 6, 4)
    # Samples of 6, 2, 2, 1, 1 tokens, and of 1, 1, 10.
    assert over_ranks(line, "rank_sequence_length") == [6.4, 3.2, 2.4, 4.0]
    assert [line[f"sequence_length_{name}"] for name in ("min", "mean", "max")] == [1, 3.0, 10]


def test_ranks_that_share_samples_count_once():
    shared = line_of((True, ONE), (False, ONE), (False, OTHER), (True, OTHER))
    assert shared == line_of((True, ONE), (True, OTHER))


def test_one_rank_has_no_imbalance_and_a_rank_without_samples_no_length():
    assert "token_imbalance" not in line_of((True, ONE))
    # Nor is anything told of tokens that are not counted.
    line = line_of((True, [[()]]), (True, [[()]]))
    assert not [key for key in line if "per_step" in key or "length" in key or "imbalance" in key]
    line = line_of((True, [[(8,)]]), (True, [[()]]))
    assert over_ranks(line, "tokens_per_step") == [8.0, 4.0, 0.0, 8.0]
    assert over_ranks(line, "rank_sequence_length") == [8.0, 8.0, 8.0, 8.0]


def test_a_report_shows_unequal_ranks(tmp_path):
    unequal = line_of((True, ONE), (True, OTHER))
    worse = {"token_imbalance": 1.8}
    lines = [LINES[0] | unequal, LINES[1] | unequal | worse]
    runs = read_runs([write_run(tmp_path / "unequal", lines), write_run(tmp_path / "one_rank")])
    results = dict(next(t for t in tables_of(runs) if t.title == "Results").rows)
    assert results["tokens of the fullest rank"] == ["1.733 times the mean, at worst 1.8", "-"]
    panels = {panel.name: panel for panel in panels_of(runs)}
    assert panels["tokens_per_step"].keys == [
        f"tokens_per_step_{name}" for name in ("mean", "min", "max")
    ]
    # On one axis a sum would flatten the others.
    assert panels["tokens_per_step_sum"].keys == ["tokens_per_step_sum"]
    found = panels["token_imbalance"]
    assert (found.section, found.title, found.unit) == (
        "Data",
        "Token imbalance (fullest rank)",
        "most over mean",
    )


def test_a_policys_lengths_are_the_real_tokens_of_its_prefix(tmp_path):
    run_file = write_tiny_policy_run(tmp_path / "run")
    trainer = build_trainer(load_run_config(run_file, []))
    batch, tokens = next(trainer.data), trainer.runner.model.tokens
    trainer.data.close()
    lengths = batch.lengths
    real = tokens.masks(batch, presence_of(batch), xp=np).pad_masks
    assert len(lengths) == batch.num_samples
    assert [*lengths] == real.sum(axis=1).tolist()
    masks = [batch["vid_masks"][0].copy(), *batch["vid_masks"][1:]]
    assert masks[0][1]
    masks[0][1] = False
    without = with_lengths(tokens, batch | {"vid_masks": masks}).lengths
    assert without == (lengths[0], lengths[1] - tokens.camera_tokens, *lengths[2:])
