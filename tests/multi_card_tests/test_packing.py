"""Training on packed rows on several ranks.

Guarantees, under model parallelism with sequence parallelism, in a pipeline, and with every layer
sharded: loss, gradient norm and every parameter after four optimizer steps equal the run on one
device with the same rows; a resumed run is bit-identical, and one rank continues what several
saved. Samples have two images, one, or none.
"""

from pathlib import Path

import pytest

from tests.multi_card_tests.test_training import common, run_file
from tests.support.finished_runs import arrays_of, assert_close, lasting_metrics
from tests.support.tolerance import TOPOLOGY
from tests.support.topology_runs import (
    CP,
    PP,
    SHARDING,
    SP,
    STAGE_3,
    EqualsOneDevice,
    batch_settings,
)

__all__ = ["run_file"]

# Two to five samples per row, the longest with 80 tokens; an epoch is one step.
PACKED = ["data.packing=true", "data.packing_length=192", "train.gradient_accumulation_steps=2"]
PACKED += ["data.max_vision_tokens_per_row=20", "data.max_length=96"]
TOPOLOGIES = {
    "mp2 with sequence parallelism": (2, ["parallel.mp_degree=2", *SP, "train.recompute=full"]),
}
HEAVY = {
    "pp2": (2, PP),
    "cp2 stage 3": (2, [*CP, STAGE_3]),
    "sharding2 stage 3": (2, [*SHARDING, STAGE_3]),
}


class TestPacking(EqualsOneDevice):
    topologies, heavy = TOPOLOGIES, HEAVY

    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        return [*common(run_file), *PACKED, *batch_settings(num_data_parts)]

    def test_every_step_and_every_parameter_equal_one_device(self, several, one_device):
        lines = zip(lasting_metrics(several), lasting_metrics(one_device), strict=True)
        for found, wanted in lines:
            # Every rank pads its rows to its own longest row.
            assert 0.5 < found.pop("packing_efficiency") <= 1
            assert 0.5 < wanted.pop("packing_efficiency") <= 1
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                assert found[key] == pytest.approx(value, rel=TOPOLOGY), (wanted["step"], key)
        assert_close(arrays_of(several / "checkpoint-4"), arrays_of(one_device / "checkpoint-4"))
