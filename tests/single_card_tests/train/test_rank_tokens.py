"""Tokens and sequence lengths over data ranks in a metrics line, and what a report tells of them.

Guarantees: sum, mean, minimum and maximum over data ranks are those of each step, averaged over the
steps, so that ranks that take turns in having most are seen; ranks that share samples count once; a
rank without samples has no sequence length; nothing is reported where tokens are not counted; a
report has the imbalance in its results and in panels, sums in panels of their own; a policy's
lengths are the real tokens of its prefix.
"""

from dataclasses import replace

import numpy as np

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
from tests.single_card_tests.report.run_folders import LINES, write_run
from tests.single_card_tests.train.batches import outcome
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run

EMPTY = HostBatch()


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
    gathered = np.stack([packed(each).numpy() for each in values])
    return StepMeter(VLLoss()).line(by_rank(gathered, values[0]))


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
    line = line_of((True, [[(8,)]]), (True, [[()]]))
    assert over_ranks(line, "tokens_per_step") == [8.0, 4.0, 0.0, 8.0]
    assert over_ranks(line, "rank_sequence_length") == [8.0, 8.0, 8.0, 8.0]


def test_a_family_that_counts_no_tokens_reports_none():
    line = line_of((True, [[()]]), (True, [[()]]))
    assert not [key for key in line if "per_step" in key or "length" in key or "imbalance" in key]


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
