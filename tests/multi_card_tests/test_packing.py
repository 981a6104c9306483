"""Training on packed rows on four ranks. `tests/routes` has those on two.

Guarantees, under context parallelism alone, with model parallelism and in a pipeline, by gathers
and by the exchange of heads: loss, gradient norm and every parameter after four optimizer steps
equal the run on one device with the same rows; a resumed run is bit-identical, and slices of
another size continue. Samples have two images, one, or none.
"""

from pathlib import Path
from typing import ClassVar

import paddle.distributed as dist
import pytest

from tests.multi_card_tests.test_training import MODEL, common, run_file
from tests.support.finished_runs import arrays_of, assert_close, lasting_metrics
from tests.support.launch import launch
from tests.support.tolerance import TOPOLOGY
from tests.support.topology_runs import (
    CP,
    HIDDEN,
    PP,
    ULYSSES,
    EqualsOneDevice,
    batch_settings,
    continue_run,
    train,
    write_mixed_run,
)

__all__ = ["run_file"]

pytestmark = pytest.mark.heavy

# Two to five samples per row, the longest with 80 tokens; an epoch is one step.
PACKED = ["data.packing=true", "data.packing_length=192", "train.gradient_accumulation_steps=2"]
PACKED += ["data.max_vision_tokens_per_row=20", "data.max_length=96"]
CP4 = ["parallel.sharding_degree=4", "parallel.cp_degree=4", "data.pad_to_multiple_of=4"]


class TestPacking(EqualsOneDevice):
    topologies: ClassVar = {
        "cp4 stage 2": (4, [*CP4, "parallel.sharding_stage=2"]),
        "cp2 mp2, tower everywhere": (
            4,
            [*CP, "parallel.mp_degree=2", "parallel.vision=replicate"],
        ),
    }

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


class TestHeads(TestPacking):
    """With heads that slices divide, by their exchange, and by gathers behind attention."""

    topologies: ClassVar = {
        "cp4 by heads": (4, [*CP4, ULYSSES]),
        "cp2 pp2, hidden": (4, [*CP, HIDDEN, *PP, "train.recompute=attention"]),
    }

    @pytest.fixture(scope="class")
    @classmethod
    def run_file(cls, tmp_path_factory) -> Path:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
        model = MODEL | {"text_config": MODEL["text_config"] | heads}
        return write_mixed_run(tmp_path_factory.mktemp("run"), 24, model)


def train_and_move(run_file: str, output_dir: str, before: list[str], after: list[str]) -> None:
    train(run_file, f"{output_dir}/first", before)
    dist.barrier()
    continue_run(run_file, f"{output_dir}/first", f"{output_dir}/then", after)


def test_a_run_continues_with_slices_of_another_size(run_file, tmp_path):
    settings = TestPacking.settings(run_file, 1)
    train(run_file, tmp_path / "one", settings)
    two = ["parallel.mp_degree=2", *CP]
    arguments = (str(run_file), str(tmp_path), [*settings, *CP4], [*settings, *two])
    launch(train_and_move, 4, arguments=arguments, timeout=300)
    found = arrays_of(tmp_path / "then" / "checkpoint-4")
    assert_close(found, arrays_of(tmp_path / "one" / "checkpoint-4"))
