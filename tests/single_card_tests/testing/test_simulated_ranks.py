"""All ranks of a tensor-parallel group in one process, and one rank alone.

Guarantees: loss, logits and every gradient of mp 1, 2, 4 and 8, the vision tower's and mergers'
included, equal the single device's, for batches with images, videos, text and empty samples, with
and without sequence parallelism, with the tower's work divided or not; for experts, tied weights,
recomputation and pi07 too. A wrong gather list, level, collective or weight makes it fail. One rank
alone issues what it issues among the others.
"""

from functools import partial

import numpy as np
import paddle
import pytest

from paddle_vl.batch.visual_index import RowPart, host_visual_indices
from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.parallel.random_state import split_random
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.testing import (
    Image,
    Video,
    assert_equals_single_device,
    first_difference,
    forbid_host_reads,
    gather_gradients,
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
BATCHES = {
    "mixed": BATCH,
    "one image": tiny_qwen3_vl_batch((1, 2, 3, 4), (5, Image(2, 2), 6)),
    "one video": tiny_qwen3_vl_batch((Video(3, 2, 2), 1)),
    "text": tiny_qwen3_vl_batch((1, 2, 3, 4, 5), (), (7, 8)),
}
WIDE = [
    (1, True, "spread"),
    *((2, sp, vision) for sp in (True, False) for vision in ("spread", "replicate")),
    (4, True, "spread"),
    (8, True, "replicate"),
    (8, False, "spread"),
]


def step(model):
    return model(**BATCH)


def pi07_loss(batch, model):
    losses = model(batch)
    return losses["MSE"] + losses["CE"]


@pytest.mark.parametrize(("mp_degree", "sequence_parallel", "vision"), WIDE)
def test_qwen3_vl_equals_a_single_device(mp_degree, sequence_parallel, vision):
    ranks = assert_equals_single_device(
        tiny_qwen3_vl, step, mp_degree, sequence_parallel=sequence_parallel, vision=vision
    )
    assert len(ranks.results) == mp_degree
    # The comparison is of everything that is trained.
    _, model = ranks.results[0]
    gradients = gather_gradients([model for _, model in ranks.results], partial_are_summed=True)
    assert set(gradients) == set(model.whole_shapes())
    assert all(np.abs(array).max() > 0 for array in gradients.values())


@pytest.mark.parametrize("name", ["one image", "one video", "text"])
def test_ranks_without_an_image_or_visual_rows_are_in_step(name):
    assert_equals_single_device(tiny_qwen3_vl, lambda model: model(**BATCHES[name]), 4)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("changes", [EXPERTS, {"tie_word_embeddings": True}], ids=["moe", "tied"])
def test_experts_and_tied_weights_equal_a_single_device(changes, sequence_parallel):
    build = partial(tiny_qwen3_vl, **changes)
    assert_equals_single_device(build, step, 4, sequence_parallel=sequence_parallel)


def test_recomputation_and_overlapped_products_equal_a_single_device():
    def build(placement):
        model = tiny_qwen3_vl(placement)
        recompute_layers([*model.vision_blocks, *model.decoder_layers])
        model.train()
        return model

    options = {"sp_async_reduce_scatter": True, "mp_async_allreduce": True}
    assert_equals_single_device(build, step, 2, fleet=FleetConfig(mp_configs=options))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("mp_degree", [2, 4])
def test_pi07_equals_a_single_device(mp_degree, sequence_parallel):
    loss = partial(pi07_loss, tiny_pi07_batch())
    assert_equals_single_device(tiny_pi07, loss, mp_degree, sequence_parallel=sequence_parallel)


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


def test_a_users_own_gather_lists_equal_a_single_device():
    assert_equals_single_device(tiny_qwen3_vl, lambda m: m(**BATCH, **carried(m)), 4)


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


def test_a_missing_collective_in_the_backward_pass_makes_it_fail(monkeypatch):
    from paddle_vl.parallel import region_ops

    # Ranks use other rows of the levels, so their gradients must be summed.
    monkeypatch.setattr(region_ops, "all_reduced", lambda grad, group: grad)
    with pytest.raises(AssertionError, match="gradient of model.visual.*by"):
        assert_equals_single_device(tiny_qwen3_vl, step, 2)


def test_a_parameter_that_differs_on_one_rank_makes_it_fail():
    def build(placement):
        model = tiny_qwen3_vl(placement)
        if placement.ops.row_part.rank == 1:
            norm = model.language_model.norm.weight
            norm.set_value(norm + 0.1)
        return model

    with pytest.raises(AssertionError, match="differ from the single device's"):
        assert_equals_single_device(build, step, 2)


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


def test_a_rank_outside_of_the_group_is_refused():
    with pytest.raises(ValueError, match=r"rank 4 is outside of \[0, 4\)"):
        one_rank(4, 4).__enter__()


def test_token_rows_that_the_ranks_do_not_divide_are_refused():
    batch = tiny_qwen3_vl_batch((1, Image(2, 2), 3), pad_to_multiple_of=3)

    def alone(rank, mp_degree):
        with one_rank(rank, mp_degree) as own:
            tiny_qwen3_vl(own.placement)(**batch)

    for rank, mp_degree in ((0, 2), (3, 4)):
        with pytest.raises(ValueError, match=f"do not divide by the model-parallel.* {mp_degree}"):
            alone(rank, mp_degree)
    with pytest.raises(ValueError, match="do not divide by the model-parallel degree 2"):
        run_ranks(lambda placement: tiny_qwen3_vl(placement)(**batch), 2)


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
