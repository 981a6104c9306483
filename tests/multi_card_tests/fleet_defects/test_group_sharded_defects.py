"""Defects of fleet's `group_sharded_parallel` when a micro-batch skips optional layers of a model.

They are why this package has its own sharding stages 2 and 3. In plain fleet, on two ranks:

- stage 2 (`os_g`) reduces a bucket once all of its parameters have gradients. A parameter without
  a gradient leaves the other gradients of its bucket unreduced, and no error is raised;
- stage 3 (`p_g_os`) gathers a layer when it is called, so the collectives depend on a rank's own
  samples. Ranks whose samples use different layers would wait for each other.

If a test fails here, a newer Paddle has changed: check whether its stages can be used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import Tensor, nn
from paddle.base import core
from paddle.distributed.fleet.meta_parallel.sharding import (
    group_sharded_optimizer_stage2,
    group_sharded_stage3,
    group_sharded_storage,
)
from paddle.distributed.sharding import group_sharded_parallel

from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.recorder import record_collectives
from paddle_vl.parallel.topology import initialize
from tests.multi_card_tests.fleet_defects.gloo_patches import install_more
from tests.support.launch import launch, outcome_of, run_checks

pytestmark = pytest.mark.heavy
RANKS, WIDTH = 2, 64


class Branched(nn.Layer):
    """A linear layer plus an optional second one."""

    def __init__(self):
        super().__init__()
        paddle.seed(3)
        self.always, self.optional = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, has_option: bool) -> Tensor:
        y = self.always(x)
        return ((y + self.optional(x) if has_option else y) ** 2).mean()


def data(rank: int) -> Tensor:
    return paddle.to_tensor(np.random.default_rng(rank).normal(size=(4, WIDTH)).astype("float32"))


class Instead:
    """A module with some of its attributes replaced."""

    def __init__(self, module: Any, **changed: Any):
        self.__dict__.update(changed, module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


@contextmanager
def runs_on_cpu() -> Iterator[None]:
    """Remove group_sharded's checks for a GPU; its code runs on a CPU."""
    add, built = group_sharded_storage.ParamStorage.add_rank_params, lambda: True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paddle.device, "get_all_custom_device_type", lambda: ["cpu"])
        patch.setattr(
            group_sharded_storage.ParamStorage,
            "add_rank_params",
            lambda self, parameters, align, convert_gpu=True: add(self, parameters, align, False),
        )
        for module in (group_sharded_optimizer_stage2, group_sharded_stage3):
            patch.setattr(module, "core", Instead(core, is_compiled_with_cuda=built))
            patch.setattr(module, "paddle", Instead(paddle, get_device=lambda: "cpu:0"))
        yield


def stage_2_error(group, has_option: bool) -> float:
    """Largest difference between the updated `always` layer and one device's."""
    single, model = Branched(), Branched()
    losses = [single(data(rank), has_option) for rank in range(RANKS)]
    (sum(losses) / RANKS).backward()
    paddle.optimizer.SGD(1.0, single.parameters()).step()
    with runs_on_cpu():
        sgd = paddle.optimizer.SGD(1.0, model.parameters())
        sharded, sgd, _ = group_sharded_parallel(model, sgd, "os_g", group=group)
        sharded(data(group.rank), has_option).backward()
        sgd.step()
    return float((model.always.weight - single.always.weight).abs().max())


def stage_3_collectives(group, has_option: bool) -> int:
    """The number of collectives of a step in which all ranks use the same layers."""
    model = Branched()
    with runs_on_cpu(), record_collectives() as recording:
        sgd = paddle.optimizer.SGD(1.0, model.parameters())
        sharded, _, _ = group_sharded_parallel(model, sgd, "p_g_os", group=group, segment_size=64)
        recording.phase = "step"
        sharded(data(group.rank), has_option).backward()
    return len(recording.of("step"))


def worker() -> dict:
    group = initialize(ParallelDegrees(sharding_degree=RANKS)).sharding_group
    install_more()
    return run_checks(
        {
            f"{check.__name__} {has_option}": partial(check, group, has_option)
            for check in (stage_2_error, stage_3_collectives)
            for has_option in (True, False)
        }
    )


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, RANKS)


def test_stage_2_does_not_reduce_what_lies_beside_a_missing_gradient(outcomes):
    assert max(outcome_of(outcomes, "stage_2_error True")) < 1e-6
    assert max(outcome_of(outcomes, "stage_2_error False")) > 1e-3


def test_stage_3_sends_what_a_ranks_own_samples_ask_for(outcomes):
    with_option = outcome_of(outcomes, "stage_3_collectives True")
    without = outcome_of(outcomes, "stage_3_collectives False")
    assert len({*with_option}) == len({*without}) == 1
    assert with_option[0] > without[0] > 0
