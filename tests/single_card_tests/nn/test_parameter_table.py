"""The table of parameters: specs, and shards that are put together."""

import copy
import gc
import weakref
from dataclasses import dataclass

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_vl.config.schema import LoRAConfig, TrainConfig
from paddle_vl.nn.master_weights import MasterWeights, master_copy
from paddle_vl.nn.parameter_table import ParameterTable, ParamSpec
from paddle_vl.train.optimizer import Optimizer
from tests.support.tiny import tiny_model

PARTIAL = ParamSpec(has_partial_gradient=True)


def parameter(*shape: int) -> paddle.Tensor:
    return nn.Layer().create_parameter(list(shape))


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda p: master_copy(p, p.detach()), lambda p: p.clone()],
    ids=["deepcopy", "master", "clone"],
)
def test_a_copy_of_a_parameter_is_unknown(duplicate):
    table, weight = ParameterTable(), parameter(2, 3)
    table.add([weight], PARTIAL)
    assert table[weight] is PARTIAL
    with pytest.raises(LookupError, match=r"\[2, 3\] has no ParamSpec: it is a copy"):
        table[duplicate(weight)]
    with pytest.raises(LookupError, match="has no ParamSpec"):
        table.full_value(duplicate(weight))


def test_the_optimizer_has_the_spec_of_a_master_weight():
    table, weight = ParameterTable(), parameter(2, 3).astype("bfloat16")
    weight = paddle.base.framework.EagerParamBase.from_tensor(weight.detach())
    table.add([weight], PARTIAL)
    settings = TrainConfig(output_dir="unused")
    store = MasterWeights([weight])
    optimizer = Optimizer([("a.weight", weight)], settings, set(), store, table)
    ((tensor, spec),) = optimizer.tensors_with_specs
    assert tensor is store.shard_of(weight)
    assert tensor is not weight
    assert spec is PARTIAL


def test_a_table_keeps_no_parameter_alive():
    table, weight = ParameterTable(), parameter(2)
    table.add([weight])
    seen = weakref.ref(weight)
    del weight
    gc.collect()
    assert seen() is None


@dataclass
class Ranks:
    """One rank's view of a group whose ranks have known values."""

    rank: int
    nranks: int = 2


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (ParamSpec(split_axis=0), (4, 3)),
        (ParamSpec(split_axis=1, blocks=(4, 2, 2)), (3, 8)),
        (ParamSpec(split_axis=2, blocks=(4, 4), is_expert=True), (6, 3, 8)),
        (ParamSpec(split_axis=1, is_expert=True), (4, 6, 3)),
        (ParamSpec(is_expert=True), (4, 3)),
        (ParamSpec(is_table=True), (4, 3)),
        (PARTIAL, (4, 3)),
    ],
)
def test_shards_put_together_are_the_full_value(spec, shape):
    full = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    shards, tables = {}, {}
    for ep_rank in range(2):
        for mp_rank in range(2):

            def gather(value, group, place=(ep_rank, mp_rank)):
                if group.nranks == 2 and group is tables[place]._mp_group:
                    return [shards[place[0], rank] for rank in range(2)]
                halves = np.split(full, 2)
                assert np.array_equal(value.numpy(), halves[place[0]])
                return halves

            place = ep_rank, mp_rank
            table = tables[place] = ParameterTable(
                *(Ranks(mp_rank), Ranks(ep_rank), gather, Ranks(ep_rank))
            )
            any_shape = parameter(*shape)
            table.add([any_shape], spec)
            shards[place] = table.own_shard(any_shape, full)
    for place, table in tables.items():
        own = parameter(*shards[place].shape)
        own.set_value(shards[place])
        table.add([own], spec)
        assert table.full_shape(own) == shape
        np.testing.assert_array_equal(table.full_value(own), full)


def test_every_parameter_of_a_model_has_a_spec():
    model = tiny_model()
    table = model.placement.parameter_table
    model.add_lora(LoRAConfig(r=2, target_modules=["q_proj", "down_proj"]))
    parameters = model.parameters()
    assert any("lora" in name for name, _ in model.named_parameters())
    assert len(table.with_specs(parameters)) == len(parameters)
    # Others are replicated, and keep what they have.
    table, first, second = ParameterTable(), parameter(2), parameter(2)
    table.add([first], PARTIAL)
    table.add_replicated([first, second])
    assert [spec for _, spec in table.with_specs([first, second])] == [PARTIAL, ParamSpec()]
