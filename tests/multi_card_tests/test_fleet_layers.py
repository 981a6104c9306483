"""Fleet's tensor-parallel layers in a model, and fleet's options for them, on simulated ranks;
what recomputes with hooks, of which Paddle has one pair for all threads, on real ones.

Guarantees: every matrix of a dense decoder layer, the token table and the loss use fleet's classes,
also with unfused linears, except for heads that several ranks share; with fleet's overlap of
products and collectives, losses and gradients equal one device's, also with frozen weights and with
adapters of both kinds; the sum of a product's input gradient is issued before the product for its
weight, and for an adapter's factor; a sequence parallel product gathers its rows again before the
first, and keeps only its own.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import paddle
import pytest
from paddle.base.core import host_memory_stat_current_value
from paddle.distributed.fleet.layers.mpu.mp_layers import InnerOverlapLinear
from paddle.distributed.fleet.meta_parallel import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    ColumnSequenceParallelLinear,
    RowSequenceParallelLinear,
    SPInnerOverlapLinear,
)

from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.config.schema import LoRAConfig
from paddle_vl.parallel import split_layers
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.split_layers import FusedColumnsOfRows, _EnteredProducts
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import initialize
from paddle_vl.testing import (
    assert_equals_single_device,
    one_rank,
    sum_partial_gradients,
    tiny_qwen3_vl,
)
from paddle_vl.testing.qwen3_vl import token_rows
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.states import stored_gradients, worst_gradient
from tests.support.tolerance import TOPOLOGY

OVERLAPS = FleetConfig(
    mp_configs={
        "mp_async_allreduce": True,
        "mp_skip_c_identity": True,
        "sp_async_reduce_scatter": True,
        "recompute_allgather": True,
    }
)
FLEET = str(Path(paddle.__file__).parent / "distributed" / "fleet")
SEPARATED = ("layers.1.self_attn", "layers.2.mlp")
IDS = token_rows([1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 9, 1])
# Each adapter's factors are drawn, and so have gradients; all linears are apart.
LORA = LoRAConfig(r=2, target_modules="all-linear", init_lora_weights="openpi")
# What is changed, and the overlapped products of a rank. In the first pass of a recomputed layer
# rows have no gradient, so its products are plain; the rows that go into a part have one.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "trained": ({}, 6),
    "frozen projections": (
        {"frozen": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}, 0,
    ),
    # The rows into the first layer have no gradient either.
    "frozen table": ({"frozen": ("embed_tokens", "layers.0", "layers.1")}, 2),
    "apart": ({"apart": True}, 6),
    "lora": ({"adapters": LORA}, 5),
    "dora": ({"adapters": LORA.model_copy(update={"use_dora": True})}, 5),
    "full": ({"recompute": "full"}, 6),
}  # fmt: skip
RECOMPUTED = {"act": 6, "attention": 9, "mlp": 9}


def model_of(
    placement: Any,
    frozen: tuple[str, ...] = (),
    apart: bool = False,
    recompute: str = "none",
    adapters: LoRAConfig | None = None,
) -> Any:
    model = tiny_qwen3_vl(placement, num_attention_heads=4)
    if apart:
        model.separate(
            item.parameter
            for item in model.stored_parameters()
            if item.block == 0 and any(layer in item.key for layer in SEPARATED)
        )
    if adapters is not None:
        paddle.seed(1)
        model.add_lora(adapters)
    for item in model.stored_parameters():
        if any(name in item.key for name in frozen):
            item.parameter.stop_gradient = True
    recompute_layers(model.decoder_layers, recompute)
    model.train()
    return model


def loss_of(model: Any) -> Any:
    return model(input_ids=IDS, labels=IDS).loss


one_of_two = partial(one_rank, 0, 2, fleet=OVERLAPS)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("sp", [False, True])
def test_every_matrix_is_in_a_layer_of_fleets(sp, apart):
    column, row = ColumnParallelLinear, RowParallelLinear
    if sp:
        # Unfused linears share rows that were gathered once for all of them.
        column, row = (ColumnSequenceParallelLinear, column), RowSequenceParallelLinear
    wanted = {"qkv_proj": column, "gate_up_proj": column, "o_proj": row, "down_proj": row}
    wanted["embed_tokens"] = VocabParallelEmbedding
    with one_of_two(sequence_parallel=sp) as own:
        model = model_of(own.placement, apart=apart)
        for name, layer in model.language_model.named_sublayers():
            weight = layer._parameters.get("weight")
            if weight is not None and weight.ndim >= 2:
                kinds = [kind for part, kind in wanted.items() if f".{part}" in f".{name}"]
                assert isinstance(layer, kinds[0]), name
        assert isinstance(model.placement.ops.vocabulary._cross_entropy, ParallelCrossEntropy)


@contextmanager
def overlapped_products() -> Iterator[list]:
    """A list with an entry for each, of all ranks."""
    found: list = []
    with ExitStack() as stack:
        for product in (InnerOverlapLinear, SPInnerOverlapLinear, _EnteredProducts):
            plain = product.apply

            def apply(*args: Any, plain: Any = plain) -> Any:
                found.append(1)
                return plain(*args)

            stack.enter_context(mock.patch.object(product, "apply", apply))
        yield found


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_device(name, sp):
    changes, num_overlapped = CASES[name]
    with overlapped_products() as found:
        assert_equals_single_device(
            partial(model_of, **changes), loss_of, 2, sequence_parallel=sp, fleet=OVERLAPS
        )
    assert len(found) == 2 * num_overlapped


def recomputed(group: Any, what: str, sp: bool) -> tuple[float, str, int]:
    """The largest error of a gradient, its name, and the number of overlapped products."""
    whole = model_of(None)
    loss_of(whole).backward()
    model = model_of(FleetPlacement(group, sp), recompute=what)
    with overlapped_products() as found:
        loss_of(model).backward()
    sum_partial_gradients(model)
    return *worst_gradient(model, stored_gradients(whole)), len(found)


def worker() -> dict:
    degrees = ParallelDegrees(mp_degree=2, sequence_parallel=True)
    group = initialize(degrees, OVERLAPS).mp_group
    return run_checks(
        {
            f"{what} {sp}": partial(recomputed, group, what, sp)
            for what in RECOMPUTED
            for sp in (False, True)
        }
    )


def test_so_are_those_of_recomputed_parts():
    outcomes = launch(worker, 2)
    for name in outcomes[0]:
        for error, where, num_overlapped in outcome_of(outcomes, name):
            assert error <= TOPOLOGY, (name, where)
            assert num_overlapped == RECOMPUTED[name.split()[0]], name


@pytest.mark.parametrize("sp", [False, True])
# With adapters query, key and value of two layers, gate and up of three: each has two products for
# the gradient of its input, of which one is frozen.
@pytest.mark.parametrize(("adapters", "num_inputs", "num_weights"), [(None, 6, 6), (LORA, 24, 12)])
def test_the_sum_for_the_input_is_issued_before_the_product_for_the_weight(
    sp, adapters, num_inputs, num_weights
):
    """What was issued last before each product for an input's gradient, and for a weight's."""
    before_input, before_weight, product = [], [], paddle.matmul
    with one_of_two(sequence_parallel=sp) as own:
        loss = loss_of(model_of(own.placement, adapters=adapters))

        def seen(*args: Any, **settings: Any) -> Any:
            if sys._getframe(1).f_code.co_filename.startswith((FLEET, split_layers.__file__)):
                before = before_input if settings.get("transpose_y") else before_weight
                before.append(own.collectives[-1].kind)
            return product(*args, **settings)

        with mock.patch.object(paddle, "matmul", seen):
            loss.backward()
    assert (len(before_input), len(before_weight)) == (num_inputs, num_weights)
    assert set(before_weight) == {"reduce_scatter" if sp else "all_reduce"}
    assert not sp or set(before_input) == {"all_gather"}


def test_a_sequence_parallel_product_keeps_its_own_rows():
    """And not the gathered ones beside."""
    found, gathered = [], 0
    for gathers_again in (True, True, False):
        with one_of_two() as own:
            model = model_of(own.placement)
            products = [one for one in model.sublayers() if isinstance(one, FusedColumnsOfRows)]
            for one in products:
                one.recompute_allgather = gathers_again
            gathered = len(products) * IDS.size * products[0].weight.shape[0] * 4
            before = host_memory_stat_current_value("Allocated", 0)
            loss = loss_of(model)
            found.append(host_memory_stat_current_value("Allocated", 0) - before)
            del loss
    assert found[2] - found[1] == gathered
