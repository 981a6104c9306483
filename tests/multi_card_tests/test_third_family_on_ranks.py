"""A model family outside of the package, the captioner of `tests.support.captioner`, on two ranks.

Guarantees, over tensor and sequence parallelism, sharding stage 3 and a pipeline: metrics,
evaluation losses and every parameter and optimizer state after four steps equal one device's; a
resumed run is bit-identical under the same topology.
"""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import tests.support.captioner  # noqa: F401 - registers the family, in each rank too
from tests.support.captioner.run import write_captioner_run
from tests.support.finished_runs import arrays_of, lasting_metrics
from tests.support.launch import launch
from tests.support.topology_runs import (
    DAMPED,
    PP,
    SHARDING,
    STAGE_3,
    EqualsOneDevice,
    batch_settings,
    train_and_resume,
)

TOLERANCE = 1e-6
MP = "parallel.mp_degree=2"


def worker(run_file: str, output_dir: str, overrides: list[str]) -> None:
    train_and_resume(run_file, output_dir, overrides)


class TestCaptioner(EqualsOneDevice):
    topologies: ClassVar = {
        "mp2 with sequence parallelism": (2, [MP, "parallel.sequence_parallel=true"]),
        "sharding2 stage 3": (2, [*SHARDING, STAGE_3, "train.recompute=full"]),
        "pp2": (2, [*PP, "parallel.pp_split=cost"]),
    }

    @pytest.fixture(scope="class")
    @classmethod
    def run_file(cls, tmp_path_factory) -> Path:
        return write_captioner_run(tmp_path_factory.mktemp("captioner"))

    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        return [*DAMPED, *batch_settings(num_data_parts)]

    @classmethod
    def launch(cls, num_ranks, run_file, output_dir, overrides):
        arguments = (str(run_file), str(output_dir), overrides)
        launch(worker, num_ranks, arguments=arguments, timeout=300)

    def test_every_step_and_every_parameter_equal_one_device(self, several, one_device):
        found, wanted = lasting_metrics(several), lasting_metrics(one_device)
        assert [line["step"] for line in found] == [1, 2, 3, 4]
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                assert ours[key] == pytest.approx(value, rel=TOLERANCE), (theirs["step"], key)
        arrays, expected = (arrays_of(run / "checkpoint-4") for run in (several, one_device))
        assert arrays.keys() == expected.keys()
        for key, array in expected.items():
            assert arrays[key].shape == array.shape, key
            most = TOLERANCE * max(np.abs(array).max(), 1)
            assert np.abs(arrays[key] - array).max() <= most, key
