"""Fleet's tensor-parallel layers in a model, and fleet's options for them.

Guarantees: every matrix of a dense decoder layer, the token table and the loss use fleet's classes,
also with unfused linears, except for heads that several ranks share; with fleet's overlap of
products and collectives, losses and gradients equal one device's, also with frozen weights and with
adapters of both kinds; the sum of a product's input gradient is issued before the product for its
weight, and for an adapter's factor; a sequence parallel product gathers its rows again before the
first, and keeps only its own.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
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

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.config.schema import LoRAConfig
from paddle_vl.parallel import split_layers
from paddle_vl.parallel.collectives import all_reduce_partial_gradients
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.recorder import record_collectives
from paddle_vl.parallel.split_layers import FusedColumnsOfRows, _EnteredProducts
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import initialize
from paddle_vl.testing.qwen3_vl import token_rows
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.tiny import tiny_model
from tests.support.tolerance import TOPOLOGY

OVERLAPS = {
    "mp_async_allreduce": True,
    "mp_skip_c_identity": True,
    "sp_async_reduce_scatter": True,
    "recompute_allgather": True,
}
RECOMPUTED = ("act", "attention", "mlp", "full")
FLEET = str(Path(paddle.__file__).parent / "distributed" / "fleet")
SEPARATED = ("layers.1.self_attn", "layers.2.mlp")


def model_of(folder: str, group, sequence_parallel: bool) -> Qwen3VLForConditionalGeneration:
    placement = FleetPlacement(group, sequence_parallel)
    return Qwen3VLForConditionalGeneration.from_pretrained(folder, placement=placement)


def separate_some(model) -> None:
    model.separate(
        item.parameter
        for item in model.stored_parameters()
        if item.block == 0 and any(layer in item.key for layer in SEPARATED)
    )


def classes(folder: str, group, sequence_parallel: bool, apart: bool) -> list[str]:
    """Matrices that are not in one of fleet's layers."""
    model = model_of(folder, group, sequence_parallel)
    if apart:
        separate_some(model)
    column, row = ColumnParallelLinear, RowParallelLinear
    if sequence_parallel:
        # Unfused linears share rows that were gathered once for all of them.
        column, row = (ColumnSequenceParallelLinear, column), RowSequenceParallelLinear
    wanted = {"qkv_proj": column, "gate_up_proj": column, "o_proj": row, "down_proj": row}
    wanted["embed_tokens"] = VocabParallelEmbedding
    wrong = []
    for name, layer in model.language_model.named_sublayers():
        weight = layer._parameters.get("weight")
        if weight is None or weight.ndim < 2:
            continue
        kind = next((kind for part, kind in wanted.items() if f".{part}" in f".{name}"), ())
        if not isinstance(layer, kind):
            wrong.append(f"{name}: {type(layer).__name__}")
    if not isinstance(model.placement.ops.vocabulary._cross_entropy, ParallelCrossEntropy):
        wrong.append("cross entropy")
    return wrong


def worst_difference(
    folder: str,
    group,
    sequence_parallel: bool,
    frozen: tuple[str, ...],
    apart: bool = False,
    recompute: str = "none",
    adapters: LoRAConfig | None = None,
) -> tuple[float, str, int]:
    """Largest relative error of loss and gradients, its tensor, and the number of overlapped
    products."""
    ids = token_rows([1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 9, 1])
    batch = {"input_ids": ids, "labels": ids}
    overlapped = []
    patch = pytest.MonkeyPatch()
    for product in (InnerOverlapLinear, SPInnerOverlapLinear, _EnteredProducts):
        plain = product.apply
        patch.setattr(
            product, "apply", lambda *args, plain=plain: (overlapped.append(1), plain(*args))[1]
        )
    found = []
    try:
        for model in (tiny_model(), model_of(folder, group, sequence_parallel)):
            if apart:
                separate_some(model)
            if adapters is not None:
                paddle.seed(1)
                model.add_lora(adapters)
            for item in model.stored_parameters():
                if any(name in item.key for name in frozen):
                    item.parameter.stop_gradient = True
            recompute_layers(model.decoder_layers, recompute)
            model.train()
            loss = model(**batch).loss
            loss.backward()
            found.append((model, loss.item()))
    finally:
        patch.undo()
    (whole, wanted_loss), (model, loss) = found
    table = model.placement.parameter_table
    all_reduce_partial_gradients(table.with_specs(model.parameters()), group)
    wanted = {
        item.key: item.layout.to_stored(item.of_own(item.parameter.grad.numpy()))
        for item in whole.stored_parameters()
        if item.parameter.grad is not None
    }
    worst = (abs(loss - wanted_loss) / wanted_loss, "loss")
    for item in model.stored_parameters():
        if item.key in wanted:
            error = item.of_own(item.parameter.grad.numpy()) - item.from_stored(wanted[item.key])
            error = np.abs(error).max() / np.abs(wanted[item.key]).max()
            worst = max(worst, (float(error), item.key))
    return *worst, len(overlapped)


def order(
    folder: str, group, sequence_parallel: bool, adapters: LoRAConfig | None = None
) -> tuple[list[str], list[str]]:
    """Of all overlapped products: what was issued last before each product for their input's
    gradient, and before each for a weight's."""
    ids = token_rows([1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 9, 1])
    model = model_of(folder, group, sequence_parallel)
    if adapters is not None:
        model.add_lora(adapters)
    loss = model(input_ids=ids, labels=ids).loss
    before_input, before_weight, product = [], [], paddle.matmul

    def seen(*args, **settings):
        if sys._getframe(1).f_code.co_filename.startswith((FLEET, split_layers.__file__)):
            before = before_input if settings.get("transpose_y") else before_weight
            before.append(recording.calls[-1].kind if recording.calls else "")
        return product(*args, **settings)

    with record_collectives() as recording, pytest.MonkeyPatch.context() as patch:
        patch.setattr(paddle, "matmul", seen)
        loss.backward()
    return before_input, before_weight


def kept(folder: str, group) -> list[int]:
    """Bytes of a forward pass that keeps its rank's rows for backward, and of one that keeps the
    gathered rows beside; bytes of the latter."""
    found, gathered = [], 0
    ids = token_rows([1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 9, 1])
    for gathers_again in (True, True, False):
        model = model_of(folder, group, True)
        products = [one for one in model.sublayers() if isinstance(one, FusedColumnsOfRows)]
        for one in products:
            one.recompute_allgather = gathers_again
        gathered = len(products) * ids.size * products[0].weight.shape[0] * 4
        before = host_memory_stat_current_value("Allocated", 0)
        loss = model(input_ids=ids, labels=ids).loss
        found.append(host_memory_stat_current_value("Allocated", 0) - before)
        del loss
    return [*found[1:], gathered]


FROZEN = {
    "trained": (),
    "frozen projections": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    # The rows into the first layer have no gradient either.
    "frozen table": ("embed_tokens", "layers.0", "layers.1"),
}


# Each adapter's factors are drawn, and so have gradients; all linears are apart.
LORA = LoRAConfig(r=2, target_modules="all-linear", init_lora_weights="openpi")
ADAPTERS = {"lora": LORA, "dora": LORA.model_copy(update={"use_dora": True})}


def worker(folder: str) -> dict:
    options = FleetConfig(mp_configs=OVERLAPS)
    group = initialize(ParallelDegrees(mp_degree=2, sequence_parallel=True), options).mp_group
    if group.rank == 0:
        tiny_model().save_pretrained(folder)
    dist.barrier()
    checks = {}
    for sp in (False, True):
        for name, frozen in FROZEN.items():
            checks[f"{name} {sp}"] = partial(worst_difference, folder, group, sp, frozen)
        for what in RECOMPUTED:
            checks[f"{what} {sp}"] = partial(
                worst_difference, folder, group, sp, (), recompute=what
            )
        checks[f"apart {sp}"] = partial(worst_difference, folder, group, sp, (), True)
        for apart in (False, True):
            checks[f"classes {sp} {apart}"] = partial(classes, folder, group, sp, apart)
        for name, adapters in ADAPTERS.items():
            checks[f"{name} {sp}"] = partial(
                worst_difference, folder, group, sp, (), adapters=adapters
            )
        checks[f"order {sp}"] = partial(order, folder, group, sp)
        checks[f"order of adapters {sp}"] = partial(order, folder, group, sp, LORA)
    checks["kept"] = partial(kept, folder, group)
    return run_checks(checks)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    arguments = (str(tmp_path_factory.mktemp("model")),)
    return launch(worker, 2, arguments=arguments, timeout=300)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("sp", [False, True])
def test_every_matrix_is_in_a_layer_of_fleets(outcomes, sp, apart):
    assert outcome_of(outcomes, f"classes {sp} {apart}") == [[], []]


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", [*FROZEN, "apart", *RECOMPUTED, *ADAPTERS])
def test_losses_and_gradients_are_those_of_one_device(outcomes, name, sp):
    for error, where, num_overlapped in outcome_of(outcomes, f"{name} {sp}"):
        assert error <= TOPOLOGY, where
        expected = {"trained": 6, "frozen projections": 0, "frozen table": 2, "apart": 6}
        # The rows of a frozen table have no gradient.
        expected |= {"lora": 5, "dora": 5}
        # In the first pass of a layer, rows have no gradient, so its products are plain; the rows
        # that go into a part have one.
        expected |= {"act": 6, "attention": 9, "mlp": 9, "full": 6}
        assert num_overlapped == expected[name]


@pytest.mark.parametrize("sp", [False, True])
# With adapters query, key and value of two layers, gate and up of three: each has two products for
# the gradient of its input, of which one is frozen.
@pytest.mark.parametrize(("name", "num_inputs", "num_weights"), [
    ("order", 6, 6), ("order of adapters", 24, 12),
])  # fmt: skip
def test_the_sum_for_the_input_is_issued_before_the_product_for_the_weight(
    outcomes, sp, name, num_inputs, num_weights
):
    for before_input, before_weight in outcome_of(outcomes, f"{name} {sp}"):
        assert (len(before_input), len(before_weight)) == (num_inputs, num_weights)
        assert set(before_weight) == {"reduce_scatter" if sp else "all_reduce"}
        assert not sp or set(before_input) == {"all_gather"}


def test_a_sequence_parallel_product_keeps_its_own_rows(outcomes):
    for own, both, gathered in outcome_of(outcomes, "kept"):
        assert both - own == gathered
