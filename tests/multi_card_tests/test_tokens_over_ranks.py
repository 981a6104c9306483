"""Tokens and sequence lengths over ranks of a real run, with sharding 2 and tensor parallel 2.

Guarantees: a metrics line has the sum, mean, minimum and maximum over data ranks of what the ranks
really trained on, mp ranks counted once; the report of the run shows that its ranks are unequal.
(That they need no collective of their own, in a pipeline too, is in `test_step_overhead`.)
"""

import numpy as np
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.report.runs import read_runs
from paddle_vl.report.summary import tables_of
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.finished_runs import metrics_of
from tests.support.launch import launch

TOPOLOGY = ["parallel.sharding_degree=2", "parallel.mp_degree=2", "data.pad_to_multiple_of=2"]


def trained_lengths(run_file: str, output_dir) -> tuple[int, list[list[int]]]:
    """Data rank, and the lengths of the samples of each of its steps."""
    overrides = [f"train.output_dir={output_dir}", "train.max_steps=4", "train.save_steps=null"]
    overrides += ["logging.logging_steps=2", *TOPOLOGY]
    trainer = build_trainer(load_run_config(run_file, overrides))
    add, steps = trainer.meter.add, []

    def seen(outcome, micro_batches, *arguments):
        steps.append([length for batch in micro_batches for length in batch.lengths])
        add(outcome, micro_batches, *arguments)

    trainer.meter.add = seen
    trainer.run()
    return trainer.ranks.data_rank, steps


def test_lines_and_report_tell_what_each_data_rank_had(tmp_path):
    run_file = write_tiny_run(tmp_path / "run")
    ranks = launch(trained_lengths, 4, arguments=(str(run_file), tmp_path / "out"))
    by_data_rank = dict(ranks)
    assert sorted(data_rank for data_rank, _ in ranks) == [0, 0, 1, 1]
    assert all(steps == by_data_rank[data_rank] for data_rank, steps in ranks)
    lines = metrics_of(tmp_path / "out")
    assert [line["step"] for line in lines] == [2, 4]
    for line, window in zip(lines, (slice(0, 2), slice(2, 4)), strict=True):
        lengths = [by_data_rank[data_rank][window] for data_rank in (0, 1)]
        tokens_RW = np.array([[sum(step) for step in steps] for steps in lengths])
        means = [np.mean([n for step in steps for n in step]) for steps in lengths]
        for name, reduce in (("sum", np.sum), ("mean", np.mean), ("min", np.min), ("max", np.max)):
            tokens = reduce(tokens_RW, axis=0).mean()
            assert line[f"tokens_per_step_{name}"] == pytest.approx(tokens, abs=0.06)
            assert line[f"rank_sequence_length_{name}"] == pytest.approx(reduce(means), abs=0.06)
        ratio = tokens_RW.max(axis=0).sum() / tokens_RW.mean(axis=0).sum()
        assert line["token_imbalance"] == pytest.approx(ratio, abs=1e-4)
        assert ratio > 1
    (results,) = (t for t in tables_of(read_runs([tmp_path / "out"])) if t.title == "Results")
    assert "times the mean" in dict(results.rows)["tokens of the fullest rank"][0]
