"""Training runs of Qwen3.5 on several ranks, against the same run file and global batch on one
device. `tests/routes` has more on two.

Guarantees: tensor parallelism with sequence parallelism, and (heavy) its mixes with a pipeline,
sharding stage 3 and expert parallelism give every metric, generated answer, parameter and moment of
one device, from samples of different lengths with two images, one and none; a resumed run is
bit-identical.
"""

from pathlib import Path
from typing import ClassVar

import pytest

from tests.single_card_tests.train.tiny_run import MODEL_3_5
from tests.support.finished_runs import (
    arrays_of,
    assert_near,
    assert_same_answers,
    lasting_metrics,
)
from tests.support.topology_runs import (
    DAMPED,
    PP,
    SHARDING,
    SP,
    STAGE_3,
    EqualsOneDevice,
    batch_settings,
    write_mixed_run,
)

EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 16, "output_router_logits": True,
}  # fmt: skip
MP = ("parallel.mp_degree=2", *SP)


def common(run_file: Path) -> list[str]:
    return [
        f"data.eval=[{run_file.with_name('test.jsonl')}]",
        *("train.save_steps=2", "train.eval_steps=2", *DAMPED),
        *("train.gradient_accumulation_steps=2", "train.per_device_eval_batch_size=1"),
        "train.eval={max_new_tokens: 5}",
    ]


class _Runs(EqualsOneDevice):
    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        return [*common(run_file), *batch_settings(num_data_parts)]

    def test_every_step_and_every_parameter_equal_one_device(self, several, one_device):
        metrics = [lasting_metrics(folder) for folder in (several, one_device)]
        for ours, theirs in zip(*metrics, strict=True):
            assert ours == {key: pytest.approx(value, rel=1e-6) for key, value in theirs.items()}
        assert_near(arrays_of(several / "checkpoint-4"), arrays_of(one_device / "checkpoint-4"))
        assert_same_answers(several, one_device)


class TestDense(_Runs):
    topologies: ClassVar = {"mp2": (2, [*MP, "train.recompute=attention"])}

    @pytest.fixture(scope="class")
    @classmethod
    def run_file(cls, tmp_path_factory) -> Path:
        return write_mixed_run(tmp_path_factory.mktemp("run"), 24, MODEL_3_5)


@pytest.mark.heavy
class TestDenseOnFourRanks(TestDense):
    topologies: ClassVar = {
        "mp2 pp2": (4, [*MP, *PP, "parallel.pp_split=cost"]),
        "sharding2 mp2 stage 3": (4, [*MP, *SHARDING, STAGE_3]),
    }


@pytest.mark.heavy
class TestExperts(_Runs):
    topologies: ClassVar = {
        "dp2 ep2 mp2": (4, ["parallel.dp_degree=2", "parallel.ep_degree=2", *MP]),
    }

    @pytest.fixture(scope="class")
    @classmethod
    def run_file(cls, tmp_path_factory) -> Path:
        text = MODEL_3_5["text_config"] | EXPERTS
        del text["intermediate_size"]
        model = MODEL_3_5 | {"model_type": "qwen3_5_moe", "text_config": text}
        return write_mixed_run(tmp_path_factory.mktemp("run"), 24, model)
