"""Training on packed rows on several ranks.

Guarantees, under model parallelism with sequence parallelism, in a pipeline, and with every layer
sharded: loss, gradient norm and every parameter after four optimizer steps equal the run on one
device with the same rows; a resumed run is bit-identical, and one rank continues what several
saved. Samples have two images, one, or none.
"""

import shutil
from pathlib import Path

import pytest

from tests.multi_card_tests.test_training import (
    PP,
    SHARDING,
    SP,
    common,
    run_file,
    settings,
    train,
    worker,
)
from tests.support.finished_runs import arrays_of, assert_close, lasting_metrics
from tests.support.launch import launch
from tests.support.tolerance import TOPOLOGY

__all__ = ["run_file"]

# Two to five samples per row, the longest with 80 tokens; an epoch is one step.
PACKED = ["data.packing=true", "data.packing_length=192", "train.gradient_accumulation_steps=2"]
PACKED += ["data.max_vision_tokens_per_row=20", "data.max_length=96"]
TOPOLOGIES = {
    "mp2 with sequence parallelism": ["parallel.mp_degree=2", *SP, "train.recompute=full"],
    "pp2": [*PP],
    "sharding2 stage 3": [*SHARDING, "parallel.sharding_stage=3"],
}


def overrides_of(run_file: Path, num_data_parts: int) -> list[str]:
    return [*common(run_file), *PACKED, *settings(num_data_parts)]


@pytest.fixture(scope="module")
def one_device(run_file, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("one") / "out"
    train(str(run_file), str(output_dir), overrides_of(run_file, 1))
    return output_dir


@pytest.fixture(scope="module", params=TOPOLOGIES)
def several(request, run_file, tmp_path_factory) -> Path:
    topology = TOPOLOGIES[request.param]
    output_dir = tmp_path_factory.mktemp("several") / "out"
    overrides = overrides_of(run_file, 2 if topology[0] in SHARDING else 1) + topology
    launch(worker, 2, arguments=(str(run_file), str(output_dir), overrides))
    return output_dir


def test_every_step_and_every_parameter_equal_one_device(several, one_device):
    for found, wanted in zip(lasting_metrics(several), lasting_metrics(one_device), strict=True):
        # Every rank pads its rows to its own longest row.
        assert 0.5 < found.pop("packing_efficiency") <= 1
        assert 0.5 < wanted.pop("packing_efficiency") <= 1
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert found[key] == pytest.approx(value, rel=TOPOLOGY), (wanted["step"], key)
    assert_close(arrays_of(several / "checkpoint-4"), arrays_of(one_device / "checkpoint-4"))


def test_a_resumed_run_is_bit_identical(several):
    found = arrays_of(Path(f"{several}-resumed") / "checkpoint-4")
    for key, array in arrays_of(several / "checkpoint-4").items():
        assert (found[key] == array).all(), key


def test_one_process_continues_what_several_saved(several, one_device, run_file, tmp_path):
    shutil.copytree(several / "checkpoint-2", tmp_path / "checkpoint-2")
    overrides = [*overrides_of(run_file, 1), "train.resume_from_checkpoint=auto"]
    train(str(run_file), str(tmp_path), overrides)
    assert_close(arrays_of(tmp_path / "checkpoint-4"), arrays_of(one_device / "checkpoint-4"))
