"""Runs that continue a checkpoint, for every kind of run: they end bit for bit as one without a
pause, and another value of a setting that decides the numbers is refused.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from paddle_vl.data import sample_lengths
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from tests.single_card_tests.train.corpus_run import write_corpus_run
from tests.single_card_tests.train.run_kinds import (
    MIXTURE,
    policy_base,
    with_mixture,
    write_lora_run,
    write_robot_run,
)
from tests.single_card_tests.train.tiny_policy_run import PLANNER, write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.single_card_tests.train.whole_runs import assert_same_run, build
from tests.support.sampled_runs import SAMPLED, write_sampled_run

DROPS = ["model.lora.lora_dropout=0.3", "train.recompute=full"]
DORA = ["model.lora.use_dora=true", "train.layer_decay={language: 0.8}"]
DORA += ["train.unfreeze=[{at: 3, patterns: [mergers]}]"]
OPENPI = ["model.lora=openpi", "model.policy.dropout=0.1", "train.recompute=full"]
UNFREEZE = "model.policy.freeze_vision_encoder=false"


class Kind(NamedTuple):
    """A kind of run.

    Attributes:
        write: writes its settings into a folder.
        settings: further ones.
        again: of the run that continues.
        changed, refusal: a setting that it may not change, and what is said.
    """

    write: Callable[[Path], Path]
    settings: Sequence[str] = ()
    again: Sequence[str] = ()
    changed: Sequence[str] = ()
    refusal: str = ""


def write_packed_run(folder: Path) -> Path:
    return write_tiny_run(folder, num_samples=40)


def write_policy_lora_run(folder: Path) -> Path:
    return policy_base(write_tiny_policy_run(folder))


def write_frozen_policy_run(folder: Path) -> Path:
    return policy_base(write_tiny_policy_run(folder, freeze_vision_encoder=True))


WORKER = ["data.num_workers=1"]
KINDS = {
    "packed": Kind(
        write_packed_run, ["data.packing=true", "data.packing_length=256"], WORKER,
        ["data.packing_length=300"], r"data\.packing_length: 256 -> 300",
    ),
    # In the middle of a generation, with log-probabilities of the policy that answered.
    "rewards": Kind(
        write_sampled_run, SAMPLED, WORKER,
        ["grpo.num_generations=4"], r"grpo\.num_generations: 2 -> 4",
    ),
    "mix": Kind(write_corpus_run, [], ["data.num_workers=2"]),
    "average": Kind(
        write_tiny_run, ["train.ema={decay: 0.6}"], [],
        ["train.ema.decay=0.7"], r"train\.ema\.decay: 0\.6 -> 0\.7",
    ),
    "adapters": Kind(
        write_lora_run, DROPS, [], ["model.lora.r=3"], r"model\.lora\.r: 2 -> 3"
    ),
    "adapters of DoRA, some frozen at first": Kind(write_lora_run, [*DROPS, *DORA]),
    "adapters of a policy": Kind(write_policy_lora_run, OPENPI),
    "planner": Kind(write_tiny_policy_run, [f"model.config={json.dumps(PLANNER)}"]),
    "changed policy": Kind(
        write_frozen_policy_run, [UNFREEZE, "model.policy.dropout=0.2"], [],
        ["model.policy.freeze_vision_encoder=true"], "policy.freeze_vision_encoder: False -> True",
    ),
    "robot datasets": Kind(
        write_robot_run, [*with_mixture(), "train.eval_steps=2"], WORKER,
        with_mixture(weights=[1.0, 1.0]), r"data\.dataset_mixture",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_is_bit_identical_and_refuses_a_change(name, tmp_path, monkeypatch):
    # So that the lanes of a checkpoint continue after it.
    monkeypatch.setattr("paddle_vl.data.corpus.loader.PHASES", 2)
    kind, whole, again = KINDS[name], tmp_path / "whole", tmp_path / "again"
    run_file = kind.write(tmp_path / "data")
    settings = [*kind.settings, "train.save_steps=2"]
    build(run_file, whole, *settings).run()
    shutil.copytree(whole / "checkpoint-2", again / "checkpoint-2")
    shutil.copy(whole / "metrics.jsonl", again)
    resume = "train.resume_from_checkpoint=auto"
    if kind.changed:
        with pytest.raises(ValueError, match=kind.refusal):
            build(run_file, again, *settings, *kind.changed, resume)

    def refuse(dataset, num_workers):
        raise AssertionError("lengths are measured again")

    monkeypatch.setattr(sample_lengths, "_measure", refuse)
    resumed = build(run_file, again, *settings, *kind.again, resume)
    assert resumed.step == 2
    resumed.run()
    assert_same_run(whole, again, begun_anew="sequence_length")
    if name == "robot datasets":
        policy = PI07LowLevelPolicy.from_pretrained(again / "final")
        assert policy.config.dataset_names == ["sawyer::ee", MIXTURE["datasets"][1]["root"]]
