"""All ranks of a tensor-parallel group in one process, and one rank alone, equal one device.

A wrong gather list, level, collective or weight makes the comparison fail.
"""

from functools import partial

import numpy as np
import paddle
import pytest

from paddle_vl.batch.visual_index import RowPart, host_visual_indices
from paddle_vl.checkpoint.writing import parameter_array
from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.nn.parameter_table import ParameterTable, ParamSpec
from paddle_vl.parallel.random_state import split_random
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.testing import (
    Image,
    MockedSequenceParallel,
    Video,
    assert_equals_single_device,
    first_difference,
    forbid_host_reads,
    gather_gradients,
    gather_parameters,
    one_rank,
    record_collectives,
    run_ranks,
    sum_partial_gradients,
    tiny_pi07,
    tiny_pi07_batch,
    tiny_qwen3_vl,
    tiny_qwen3_vl_batch,
)
from paddle_vl.testing.qwen3_vl import EXPERTS, IMAGE, VIDEO

BATCH = tiny_qwen3_vl_batch()


def step(model):
    return model(**BATCH)


def pi07_loss(model):
    losses = model(tiny_pi07_batch())
    return losses["MSE"] + losses["CE"]


def recomputed(placement):
    model = tiny_qwen3_vl(placement)
    recompute_layers([*model.vision_blocks, *model.decoder_layers])
    model.train()
    return model


def of_batch(*samples):
    batch = tiny_qwen3_vl_batch(*samples)
    return lambda model: model(**batch)


OVERLAPPED = {"sp_async_reduce_scatter": True, "mp_async_allreduce": True}
OF_EXPERTS = partial(tiny_qwen3_vl, **EXPERTS)
TIED = partial(tiny_qwen3_vl, tie_word_embeddings=True)
BOTH = (True, False)
# The model, its step, the degree of tensor parallelism, and settings.
EQUAL = [
    *((tiny_qwen3_vl, step, mp, {}) for mp in (1, 2, 4)),
    *((tiny_qwen3_vl, step, 2, {"sequence_parallel": sp, "vision": "replicate"}) for sp in BOTH),
    *((tiny_qwen3_vl, step, mp, {"sequence_parallel": False}) for mp in (2, 8)),
    (tiny_qwen3_vl, step, 8, {"vision": "replicate"}),
    # Ranks without an image, or without visual rows.
    (tiny_qwen3_vl, of_batch((1, 2, 3, 4), (5, Image(2, 2), 6)), 4, {}),
    (tiny_qwen3_vl, of_batch((Video(3, 2, 2), 1)), 4, {}),
    (tiny_qwen3_vl, of_batch((1, 2, 3, 4, 5), (), (7, 8)), 4, {}),
    *((build, step, 4, {"sequence_parallel": sp}) for build in (OF_EXPERTS, TIED) for sp in BOTH),
    (recomputed, step, 2, {"fleet": FleetConfig(mp_configs=OVERLAPPED)}),
    *((tiny_pi07, pi07_loss, mp, {"sequence_parallel": sp}) for mp in (2, 4) for sp in BOTH),
    # A user's own gather lists.
    (tiny_qwen3_vl, lambda model: model(**BATCH, **carried(model)), 4, {}),
]


@pytest.mark.parametrize(("build", "run", "mp_degree", "settings"), EQUAL)
def test_ranks_equal_a_single_device(build, run, mp_degree, settings):
    ranks = assert_equals_single_device(build, run, mp_degree, **settings)
    assert len(ranks.results) == mp_degree
    if (build, run) == (tiny_qwen3_vl, step):
        # The comparison is of everything that is trained.
        models = [model for _, model in ranks.results]
        gradients = gather_gradients(models, partial_are_summed=True)
        assert set(gradients) == set(models[0].whole_shapes())
        assert all(np.abs(array).max() > 0 for array in gradients.values())


def carried(model, rank_of=lambda rank, size: rank, rows=0) -> dict:
    """The rank's index lists, of another rank or shifted if asked."""
    part, merge = model.placement.ops.row_part, 4
    counts = {
        f"num_{kind}_rows": int(BATCH[f"{kind}_grid_thw"].prod(axis=1).sum()) // merge
        for kind in ("image", "video")
    }
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    own = host_visual_indices(BATCH["input_ids"], **ids, **counts, part=part)
    other = host_visual_indices(
        BATCH["input_ids"], **ids, **counts, part=RowPart(rank_of(part.rank, part.size), part.size)
    )
    if part.size > 1:
        own["visual_gather_indices"] = (
            np.resize(other["visual_gather_indices"], own["visual_gather_indices"].shape) + rows
        ) % sum(counts.values())
    return own


@pytest.mark.parametrize(
    ("mp_degree", "wrong"),
    [
        (2, {"rank_of": lambda rank, size: 1 - rank}),
        (4, {"rows": 1}),
        (8, {"rank_of": lambda rank, size: (rank + 2) % size}),
    ],
    ids=["of the other rank", "off by one row", "of another rank"],
)
def test_a_wrong_gather_list_makes_the_users_test_fail(mp_degree, wrong):
    with pytest.raises(AssertionError, match="differ from the single device's"):
        assert_equals_single_device(
            tiny_qwen3_vl, lambda m: m(**BATCH, **carried(m, **wrong)), mp_degree
        )


def with_another_norm(placement):
    model = tiny_qwen3_vl(placement)
    if placement.ops.row_part.rank == 1:
        norm = model.language_model.norm.weight
        norm.set_value(norm + 0.1)
    return model


def test_a_missing_collective_and_a_parameter_of_one_rank_make_it_fail(monkeypatch):
    with pytest.raises(AssertionError, match="differ from the single device's"):
        assert_equals_single_device(with_another_norm, step, 2)
    # Ranks use other rows of the levels, so their gradients must be summed.
    monkeypatch.setattr("paddle_vl.parallel.region_ops.all_reduced", lambda grad, group: grad)
    with pytest.raises(AssertionError, match="gradient of model.visual.*by"):
        assert_equals_single_device(tiny_qwen3_vl, step, 2)


def test_ranks_keep_their_own_gradients_until_these_are_summed():
    def forward_and_backward(placement, sums):
        model = tiny_qwen3_vl(placement)
        model(**BATCH).loss.backward()
        if sums:
            sum_partial_gradients(model)
        return model

    apart = gather_gradients(run_ranks(partial(forward_and_backward, sums=False), 4).results)
    ranks = run_ranks(partial(forward_and_backward, sums=True), 4)
    summed = gather_gradients(ranks.results, partial_are_summed=True)
    assert set(apart) == set(summed)
    for key, array in summed.items():
        np.testing.assert_allclose(apart[key], array, atol=1e-5 * np.abs(array).max())
    models = run_ranks(partial(forward_and_backward, sums=False), 4).results
    with pytest.raises(AssertionError, match="is replicated, but ranks 0 and"):
        gather_gradients(models, partial_are_summed=True)


def test_a_step_of_a_rank_reads_nothing_on_the_host():
    def body(placement):
        model = tiny_qwen3_vl(placement)
        indices = {name: paddle.to_tensor(array) for name, array in carried(model).items()}
        with forbid_host_reads(shapes=True):
            loss = model(**BATCH, **indices).loss
            loss.backward()
            sum_partial_gradients(model)
        return loss.item()

    losses = run_ranks(body, 4).results
    assert losses == losses[:1] * 4


def test_every_rank_draws_alike_but_for_sharded_tensors():
    def draw(placement):
        same = paddle.rand([1]).item()
        with split_random():
            return same, paddle.rand([1]).item()

    paddle.seed(5)
    drawn = run_ranks(draw, 4).results
    assert len({same for same, _ in drawn}) == 1
    assert len({own for _, own in drawn}) == 4
    # The caller's generator stays where it was.
    assert paddle.rand([1]).item() == drawn[0][0]


def test_guards_and_recordings_belong_to_the_rank_that_enters_them():
    def body(placement):
        rank, x = placement.ops.mp_group.rank, paddle.ones([4, 4])
        with record_collectives() as recording:
            recording.phase = f"on rank {rank}"
            if rank == 1:
                with forbid_host_reads():
                    x = placement.ops.enter_columns(x)
            else:
                x = placement.ops.enter_columns(x)
                x.numpy()
        placement.ops.enter_columns(x)
        return recording.calls

    ranks = run_ranks(body, 3)
    for rank, calls in enumerate(ranks.results):
        assert [(call.phase, call.kind) for call in calls] == [(f"on rank {rank}", "all_gather")]
    assert [len(calls) for calls in ranks.collectives] == [2] * 3


def whole_step(placement):
    model = tiny_qwen3_vl(placement)
    output = model(**BATCH)
    output.loss.backward()
    return output.loss.item(), model


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_one_rank_alone_issues_what_it_issues_among_the_others(sequence_parallel):
    among = run_ranks(whole_step, 4, sequence_parallel=sequence_parallel).collectives
    alone = []
    for rank in range(4):
        with one_rank(rank, 4, sequence_parallel=sequence_parallel) as own:
            loss, model = whole_step(own.placement)
        assert np.isfinite(loss)
        assert own.placement.ops.mp_group.rank == rank
        assert np.isfinite(model.lm_head.weight.grad.numpy()).all()
        alone.append(own.collectives)
    assert alone == among
    assert first_difference(alone) is None


def test_ranks_that_do_not_divide_the_token_rows_and_no_rank_are_refused():
    batch = tiny_qwen3_vl_batch((1, Image(2, 2), 3), pad_to_multiple_of=3)

    def alone(rank, mp_degree):
        with one_rank(rank, mp_degree) as own:
            tiny_qwen3_vl(own.placement)(**batch)

    for rank, mp_degree in ((0, 2), (3, 4)):
        with pytest.raises(ValueError, match=f"do not divide by the model-parallel.* {mp_degree}"):
            alone(rank, mp_degree)
    with pytest.raises(ValueError, match=r"rank 4 is outside of \[0, 4\)"):
        alone(4, 4)


def test_a_model_used_after_its_simulation_is_refused():
    _, model = run_ranks(whole_step, 2).results[0]
    with pytest.raises(RuntimeError, match="outside of its simulation|fleet|_hcg"):
        model(**BATCH)


def test_simulations_do_not_nest_and_leave_fleet_as_it_was():
    from paddle.distributed import fleet

    before = dict(vars(fleet.fleet)), fleet.get_hybrid_communicate_group
    with pytest.raises(RuntimeError, match="end them before you start others"):
        run_ranks(lambda placement: run_ranks(lambda inner: None, 2), 2)
    before_them = pytest.raises(RuntimeError, match="before the simulated ranks were started")
    with record_collectives(), before_them:
        run_ranks(lambda placement: None, 2)
    with pytest.raises(ValueError, match="mp_degree is 0"):
        run_ranks(lambda placement: None, 0)
    assert (dict(vars(fleet.fleet)), fleet.get_hybrid_communicate_group) == before
    assert run_ranks(lambda placement: 3, 2).results == [3, 3]


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
    spec, ones = ParamSpec(has_partial_gradient=True), np.ones((2,), np.float32)
    models = [Shards(spec, ones) for _ in range(2)]
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
