"""Training on packed rows on several ranks.

Guarantees, under model and context parallelism, in a pipeline, and with every layer
sharded: loss, gradient norm and every parameter after four optimizer steps equal the run on one
device with the same rows; a resumed run is bit-identical, one rank continues what several saved,
and so do slices of another size. Samples have two images, one, or none.
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
    SHARDING,
    SP,
    STAGE_3,
    ULYSSES,
    EqualsOneDevice,
    batch_settings,
    continue_run,
    train,
    write_mixed_run,
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
CP4 = ["parallel.sharding_degree=4", "parallel.cp_degree=4", "data.pad_to_multiple_of=4"]
HEAVY |= {
    "cp4 stage 2": (4, [*CP4, "parallel.sharding_stage=2"]),
    "cp2 mp2, tower everywhere": (4, [*CP, "parallel.mp_degree=2", "parallel.vision=replicate"]),
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


class TestHeads(TestPacking):
    """With heads that slices divide, by their exchange, and by gathers behind attention."""

    topologies: ClassVar = {"cp2 by heads": (2, [*CP, ULYSSES])}
    heavy: ClassVar = {
        "cp4 by heads": (4, [*CP4, ULYSSES]),
        "cp2 mp2 by heads, with sequence parallelism": (
            4,
            [*CP[:-1], ULYSSES, "parallel.mp_degree=2", SP[0], "data.pad_to_multiple_of=4"],
        ),
        "cp2 pp2 by heads": (4, [*CP, ULYSSES, *PP, "train.recompute=attention"]),
        "cp2 stage 3 by heads": (2, [*CP, ULYSSES, STAGE_3, "train.recompute=act"]),
        "cp2 pp2, hidden": (4, [*CP, HIDDEN, *PP, "train.recompute=attention"]),
        "cp2 stage 3, hidden": (2, [*CP, HIDDEN, STAGE_3, "train.recompute=mlp"]),
        "cp2, hidden": (2, [*CP, HIDDEN, "train.recompute=act"]),
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


@pytest.mark.heavy
def test_a_run_continues_with_slices_of_another_size(run_file, tmp_path):
    settings = TestPacking.settings(run_file, 1)
    train(run_file, tmp_path / "one", settings)
    two = ["parallel.mp_degree=2", *CP]
    arguments = (str(run_file), str(tmp_path), [*settings, *CP4], [*settings, *two])
    launch(train_and_move, 4, arguments=arguments, timeout=300)
    found = arrays_of(tmp_path / "then" / "checkpoint-4")
    assert_close(found, arrays_of(tmp_path / "one" / "checkpoint-4"))
