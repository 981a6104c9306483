"""A model family outside of the package, the captioner of `tests.support.captioner`, on two ranks.

Guarantees, over tensor parallelism, also with sequence parallelism, sharding stages 1 and 3 and a
pipeline: metrics, evaluation losses and every parameter and optimizer state after four steps equal
one device's; a resumed run is bit-identical under the same topology.

Adam divides a gradient by its size, which turns rounding noise of entries near zero into full
updates; a large epsilon damps them.
"""

import shutil
from pathlib import Path

import numpy as np
import paddle.distributed as dist
import pytest

import tests.support.captioner  # noqa: F401 - registers the family, in each rank too
from tests.support.captioner.run import train_captioner, write_captioner_run
from tests.support.finished_runs import arrays_of, lasting_metrics
from tests.support.launch import launch

TOLERANCE = 1e-6
COMMON = ("train.adam_epsilon=1e-2", "train.weight_decay=0.1")
MP, PP = "parallel.mp_degree=2", "parallel.pp_degree=2"
# Each of two data-parallel ranks takes half of the micro-batch.
SHARDING = ("parallel.sharding_degree=2", "train.per_device_train_batch_size=2")
TOPOLOGIES = {
    "mp2": [MP],
    "mp2 with sequence parallelism": [MP, "parallel.sequence_parallel=true"],
    "sharding2 stage 1": [*SHARDING, "parallel.sharding_stage=1"],
    "sharding2 stage 3": [*SHARDING, "parallel.sharding_stage=3", "train.recompute=full"],
    "pp2": [PP, "parallel.pp_split=cost"],
}


def worker(run_file: str, output_dir: str, overrides: list[str]) -> None:
    """A full run, and one that continues its checkpoint of step 2."""
    train_captioner(run_file, output_dir, *overrides)
    resumed = Path(f"{output_dir}-resumed")
    if dist.get_rank() == 0:
        shutil.copytree(f"{output_dir}/checkpoint-2", resumed / "checkpoint-2")
    dist.barrier()
    train_captioner(run_file, resumed, *overrides, "train.resume_from_checkpoint=auto")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_captioner_run(tmp_path_factory.mktemp("captioner"))


@pytest.fixture(scope="module")
def one_device(run_file, tmp_path_factory) -> Path:
    return train_captioner(run_file, tmp_path_factory.mktemp("one") / "out", *COMMON)


@pytest.fixture(scope="module", params=TOPOLOGIES)
def two_ranks(request, run_file, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("two") / "out"
    overrides = [*COMMON, *TOPOLOGIES[request.param]]
    launch(worker, 2, arguments=(str(run_file), str(output_dir), overrides))
    return output_dir


def test_every_step_and_every_parameter_equal_one_device(two_ranks, one_device):
    found, wanted = lasting_metrics(two_ranks), lasting_metrics(one_device)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=TOLERANCE), (theirs["step"], key)
    arrays, expected = (arrays_of(run / "checkpoint-4") for run in (two_ranks, one_device))
    assert arrays.keys() == expected.keys()
    for key, array in expected.items():
        assert arrays[key].shape == array.shape, key
        assert np.abs(arrays[key] - array).max() <= TOLERANCE * max(np.abs(array).max(), 1), key


def test_a_resumed_run_is_bit_identical(two_ranks):
    expected = arrays_of(two_ranks / "checkpoint-4")
    found = arrays_of(Path(f"{two_ranks}-resumed") / "checkpoint-4")
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
