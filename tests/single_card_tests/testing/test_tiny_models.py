"""Tiny models and batches, and full tensors put together from shards."""

from functools import partial

import numpy as np
import paddle
import pytest

from paddle_vl.checkpoint.writing import parameter_array
from paddle_vl.nn.parameter_table import ParameterTable, ParamSpec
from paddle_vl.testing import (
    Image,
    MockedSequenceParallel,
    Video,
    first_difference,
    gather_gradients,
    gather_parameters,
    run_ranks,
    tiny_pi07,
    tiny_qwen3_vl,
    tiny_qwen3_vl_batch,
)
from paddle_vl.testing.qwen3_vl import EXPERTS, IMAGE, VIDEO


@pytest.mark.parametrize(
    "build",
    [tiny_qwen3_vl, partial(tiny_qwen3_vl, **EXPERTS), tiny_pi07],
    ids=["qwen3_vl", "moe", "pi07"],
)
@pytest.mark.parametrize("mp_degree", [2, 8])
def test_parameters_of_all_ranks_are_those_of_a_single_device(build, mp_degree):
    whole = build()
    wanted = {item.key: parameter_array(item) for item in whole.stored_parameters()}
    found = gather_parameters(run_ranks(build, mp_degree).results)
    assert set(found) == set(wanted)
    for key, array in wanted.items():
        assert (found[key] == array).all(), key
        # A constant would hide a wrong order of shards.
        assert array.size == 1 or array.std() > 0, key


def test_a_batch_has_what_its_samples_say():
    batch = tiny_qwen3_vl_batch((1, Image(4, 2), 2), (), (Video(2, 2, 2), 5), pad_to_multiple_of=6)
    assert batch["input_ids"].tolist() == [
        [1, IMAGE, IMAGE, 2, 0, 0],
        [0] * 6,
        [1, VIDEO, 2, VIDEO, 5, 0],
    ]
    assert batch["attention_mask"].sum(axis=1).tolist() == [4, 0, 5]
    assert batch["labels"].tolist() == [
        [-100, -100, -100, 2, -100, -100],
        [-100] * 6,
        [-100, -100, 2, -100, 5, -100],
    ]
    assert batch["image_grid_thw"].tolist() == [[1, 4, 2]]
    assert batch["video_grid_thw"].tolist() == [[2, 2, 2]]
    assert (len(batch["pixel_values"]), len(batch["pixel_values_videos"])) == (8, 8)
    assert set(tiny_qwen3_vl_batch((1, 2))) == {"input_ids", "attention_mask", "labels"}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Image(3, 4), r"Image\(height=3, width=4\): sizes are .* even"),
        (Video(0, 2, 2), "sizes are in patches and positive"),
        (IMAGE, "token id 60: ids of text"),
        (-1, "token id -1: ids of text"),
    ],
)
def test_wrong_items_of_a_sample_are_refused(item, message):
    with pytest.raises(ValueError, match=message):
        tiny_qwen3_vl_batch((1, item))


class Shards(paddle.nn.Layer):
    """A layer of a user, whose table says how its parameters are sharded."""

    def __init__(self, spec: ParamSpec, value: np.ndarray):
        super().__init__()
        self.weight = self.create_parameter(value.shape)
        self.weight.set_value(value)
        self.placement = MockedSequenceParallel(0, 2)
        self.placement.layers.parameter_table = ParameterTable()
        self.placement.parameter_table.add([self.weight], spec)


def test_shards_of_a_users_layer_are_put_together_by_their_spec():
    full = np.arange(24, dtype=np.float32).reshape(2, 12)
    plain = [Shards(ParamSpec(1), part) for part in np.split(full, 2, axis=1)]
    assert (gather_parameters(plain)["weight"] == full).all()
    # Of two fused matrices of widths 4 and 8 every rank has a half of each.
    halves = [
        np.concatenate([full[:, a:b], full[:, c:d]], axis=1)
        for a, b, c, d in ((0, 2, 4, 8), (2, 4, 8, 12))
    ]
    fused = [Shards(ParamSpec(1, (4, 8)), part) for part in halves]
    assert (gather_parameters(fused)["weight"] == full).all()


def test_differences_between_ranks_are_named():
    one = np.ones((2, 2), np.float32)
    with pytest.raises(AssertionError, match="weight is replicated, but ranks 0 and 1 differ by 1"):
        gather_parameters([Shards(ParamSpec(), one), Shards(ParamSpec(), 2 * one)])
    models = [Shards(ParamSpec(0), one), Shards(ParamSpec(0), one)]
    models[0].weight.sum().backward()
    with pytest.raises(AssertionError, match=r"weight: ranks \[1\] have no gradient"):
        gather_gradients(models)
    other = Shards(ParamSpec(), one)
    other.other = other.weight
    del other.weight
    with pytest.raises(ValueError, match="different parameters: other, weight"):
        gather_parameters([Shards(ParamSpec(), one), other])


def test_partial_gradients_of_replicas_are_summed():
    models = [Shards(ParamSpec(has_partial_gradient=True), np.ones((2,), np.float32))] * 1
    models += [Shards(ParamSpec(has_partial_gradient=True), np.ones((2,), np.float32))] * 1
    (models[0].weight * 3).sum().backward()
    # A replica without a gradient counts as zeros.
    assert gather_gradients(models)["weight"].tolist() == [3, 3]
    (models[1].weight * 4).sum().backward()
    assert gather_gradients(models)["weight"].tolist() == [7, 7]


def test_the_mock_of_an_embedding_refuses_a_decoder_and_a_rank_outside():
    model = tiny_qwen3_vl(MockedSequenceParallel(1, 2))
    with pytest.raises(RuntimeError, match="enter_columns needs the rows of all ranks"):
        model(**tiny_qwen3_vl_batch())
    with pytest.raises(ValueError, match=r"rank 2, outside \[0, 2\)"):
        MockedSequenceParallel(2, 2)


def test_recordings_of_some_ranks_are_refused():
    def gather(placement):
        placement.ops.enter_columns(paddle.ones([4, 4]))

    first, second, _ = run_ranks(gather, 3).collectives
    with pytest.raises(ValueError, match="rank 2 takes part in the calls, .* of 2 ranks"):
        first_difference([first, second])
