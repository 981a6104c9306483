"""AdamW over flat buckets on several ranks.

Guarantees, with data parallelism around sharding stages 2 and 3, with tensor parallelism in a
pipeline with tied weights, and with a colocated encoder: parameters, moments and powers of beta
after some steps have the bits of updates per tensor, on every rank; fleet's sharding takes no
buckets. Half of the micro-batches have no image.
"""

from pathlib import Path

import numpy as np
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.train.build import build_trainer
from tests.support.launch import launch
from tests.support.states import states_of

TOPOLOGIES = {
    "dp2 sharding2 stage 3": (
        4, ["parallel={dp_degree: 2, sharding_degree: 2, sharding_stage: 3}"],
    ),
    "pp2 mp2": (4, ["parallel={pp_degree: 2, mp_degree: 2}"]),
    "pp2 colocated": (2, ["parallel={pp_degree: 2, schedule: colocated}"]),
}  # fmt: skip


def states(run_file: str, folder: Path, overrides: list[str]) -> list[dict[str, np.ndarray]]:
    """This rank's parameters and state after some steps, per tensor and in buckets."""
    found = []
    for flat in (False, True):
        trainer = build_trainer(
            load_run_config(
                run_file,
                [
                    f"train.output_dir={folder / str(flat)}", "train.max_steps=3",
                    "train.save_steps=null", "train.max_grad_norm=0.0",
                    "train.gradient_accumulation_steps=2", *overrides,
                ],
            )
        )  # fmt: skip
        optimizer = trainer.optimizer
        if flat:
            num_tensors = len(optimizer.tensors)
            optimizer.use_buckets()
            assert len(optimizer.tensors) < num_tensors
        trainer.run()
        arrays = states_of(optimizer)
        for name, parameter in trainer.runner.model.hf_named_parameters():
            full = optimizer.store.gathered_value(parameter)
            arrays[name] = full.numpy().copy()
        found.append(arrays)
    return found


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_buckets_have_the_bits_of_updates_per_tensor(name, run_file, tmp_path):
    num_ranks, overrides = TOPOLOGIES[name]
    for per_tensor, flat in launch(
        states, num_ranks, arguments=(str(run_file), tmp_path, overrides)
    ):
        assert set(flat) == set(per_tensor)
        assert any("moment1" in name for name in flat)
        for key, array in per_tensor.items():
            np.testing.assert_array_equal(flat[key], array, err_msg=key)
