"""Pipeline stages of Qwen3-VL and Qwen3.5 on one device, plain and colocated, are the whole
model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_vl.batch.positions import mrope_position_ids
from paddle_vl.batch.schema import VLBatch
from paddle_vl.batch.visual_index import host_visual_indices
from paddle_vl.config.load import load_run_config
from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration
from paddle_vl.families.vlm.inputs.collate import prepared
from paddle_vl.families.vlm.modeling.model import VLOutput
from paddle_vl.families.vlm.recipe import encoder_shape
from paddle_vl.families.vlm.training.colocated import (
    ColocatedBatchAdapter,
    ColocatedStage,
    VisualEncoder,
)
from paddle_vl.families.vlm.training.pipeline import (
    VLStage,
    float32_from_rows,
    float32_to_rows,
    layer_costs,
    num_float32_rows,
)
from paddle_vl.nn.parameter_table import Tie
from paddle_vl.nn.placement import SingleDevicePlacement, StageLayers
from paddle_vl.nn.transfer import on_device
from paddle_vl.parallel.colocated.host_rows import HostRows
from paddle_vl.parallel.colocated.runner import Leaves
from paddle_vl.testing import record_device_copies, record_host_reads, tiny_qwen3_5
from paddle_vl.testing.qwen3_vl import EXPERTS, IMAGE, VIDEO, patches, token_rows
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.captioner.run import write_captioner_run
from tests.support.pinned import pinned_on_a_cpu
from tests.support.tiny import tiny_config, tiny_model

GRIDS = {"image": [[1, 2, 4], [1, 4, 2], [1, 2, 2]], "video": [[2, 2, 2], [1, 4, 4]]}
KINDS = [("image",), ("video",), ("image", "video")]
CUTS = [[3], [1, 2, 3], [1, 3], [2, 3]]
# The load-balancing loss is as large as the cross entropy.
BALANCED = EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 4.0}
BUILDS = {
    "qwen3_vl": tiny_model,
    "qwen3_vl experts": partial(tiny_model, **BALANCED),
    "qwen3_5": tiny_qwen3_5,
}


def batch_of(kinds: tuple[str, ...], vision: Any = None) -> VLBatch:
    """Two samples; items of both kinds alternate."""
    rows = []
    for number in range(3):
        for kind in kinds:
            if number < len(GRIDS[kind]):
                thw = GRIDS[kind][number]
                # A frame of a video is a run of its own.
                for frame in range(thw[0]):
                    rows += [(kind, thw[1] * thw[2] // 4), 2 + frame]
    ids = token_rows([1, *rows, 3], [4, 5, 6])
    batch = {
        "input_ids": ids, "attention_mask": (ids != 0).astype(np.int64),
        "labels": np.where(ids < 60, ids, -100), "has_left_padding": False,
    }  # fmt: skip
    counts = {"num_image_rows": 0, "num_video_rows": 0}
    for seed, kind in enumerate(kinds):
        names = {"image": "pixel_values", "video": "pixel_values_videos"}
        batch[names[kind]], batch[f"{kind}_grid_thw"] = patches(GRIDS[kind], seed)
        counts[f"num_{kind}_rows"] = int(np.prod(GRIDS[kind], axis=1).sum()) // 4
    batch |= host_visual_indices(ids, image_token_id=IMAGE, video_token_id=VIDEO, **counts)
    ids_of = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    thws = [batch.get(f"{kind}_grid_thw") for kind in GRIDS]
    batch["position_ids"], _ = mrope_position_ids(ids, batch["attention_mask"], *thws, **ids_of)
    batch["num_target_tokens"] = int((batch["labels"][:, 1:] != -100).sum())
    return prepared(batch, vision)


def ranges(ends: list[int]) -> list[range]:
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def through_stages(stages: list[VLStage], batch: VLBatch) -> VLOutput:
    rows = None
    for stage in stages:
        if rows is not None:
            assert stage.input_shape(batch) == tuple(rows.shape)
        rows = stage(batch, rows)
    return rows


def colocated_model(build: Callable[[], Any] = tiny_model) -> Any:
    """The tiny model with a tower on every stage; all layers, to run the stages in a row."""
    own = build()
    placement = SingleDevicePlacement(StageLayers(encoder_everywhere=True))
    model = type(own)(own.config, placement)
    for mine, theirs in zip(model.parameters(), own.parameters(), strict=True):
        mine.set_value(theirs)
    return model


def backward_colocated(model: Any, batch: VLBatch, ends: list[int]) -> VLOutput:
    """The output of stages that take the encoder's rows with the batch, after its backward."""
    encoder, leaves = VisualEncoder(model), None
    rows, costs = encoder.items(batch)
    assert (costs > 0).all()
    if len(rows):
        # As two ranks would: every second item each, brought back into order.
        items = np.arange(len(rows))
        shares = [items[::2], items[1::2]]
        outputs = [encoder.encode([batch], [share]) for share in shares]
        split = [
            paddle.split(out, rows[own].tolist()) for out, own in zip(outputs, shares, strict=True)
        ]
        full = paddle.concat([split[item % 2][item // 2] for item in items])
        widths = encoder.section_widths
        leaves = Leaves(full, [int(rows.sum())], widths, range(len(widths)), needs_gradient=True)
    hidden = None
    for stage in [ColocatedStage(model, layers) for layers in ranges(ends)]:
        wanted = encoder.sections_of(stage)
        assert (0 in wanted) == stage.is_first
        stage_batch = encoder.language_batch(
            batch, {} if leaves is None else leaves.sections(0, wanted)
        )
        assert not {"pixel_values", "pixel_values_videos"} & stage_batch.keys()
        if hidden is not None:
            # Token rows only, if there is no balance: no level travels.
            assert stage.input_shape(stage_batch) == tuple(hidden.shape)
            has_balance = model.config.text_config.has_experts(0)
            assert has_balance or hidden.shape[0] == batch["input_ids"].size
        hidden = stage(stage_batch, hidden)
    hidden.share_of_step(3, 2).backward()
    if leaves is not None:
        paddle.autograd.backward([full], [leaves.gradient()])
    return hidden


@pytest.mark.parametrize("is_colocated", [False, True], ids=["plain", "colocated"])
@pytest.mark.parametrize("ends", CUTS, ids=str)
@pytest.mark.parametrize("kinds", [*KINDS, ()], ids=str)
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_stages_in_a_row_are_the_whole_model(build, kinds, ends, is_colocated):
    """With the loss weights and the sums of sources."""
    batch = batch_of(kinds)
    numbers_N = np.arange(batch["target_rows"].shape[1])
    batch |= {"target_weights": (1 + numbers_N % 3).astype("float32")}
    batch |= {"target_sources": numbers_N % 2, "num_sources": 2}
    model = build()
    whole = model(**batch)
    whole.share_of_step(3, 2).backward()
    if is_colocated:
        other = colocated_model(build)
        output = backward_colocated(other, batch, ends)
    else:
        other = build()
        output = through_stages([VLStage(other, layers) for layers in ranges(ends)], batch)
        output.share_of_step(3, 2).backward()
    assert (output.aux_loss is not None) == (build is BUILDS["qwen3_vl experts"])
    for found, wanted in (
        (output.share_of_step(3, 2), whole.share_of_step(3, 2)),
        (output.source_sums, whole.source_sums),
    ):
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-6)
    error = 1e-5 if is_colocated or build is tiny_qwen3_5 else 1e-6
    for (name, a), (_, b) in zip(
        other.hf_named_parameters(), model.hf_named_parameters(), strict=True
    ):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            scale = max(np.abs(b.grad.numpy()).max(), 0.0 if is_colocated else 1e-6)
            assert np.abs(a.grad.numpy() - b.grad.numpy()).max() <= error * scale, name


def test_stages_do_not_read_a_batch_back_from_the_device():
    batch, model = batch_of(("image",)), tiny_model()
    stages = [VLStage(model, layers) for layers in ranges([1, 3])]
    wanted = through_stages(stages, batch).loss_sum.item()
    there = on_device(batch)
    with record_host_reads() as reads:
        output = through_stages(stages, there)
    assert reads == []
    assert output.loss_sum.item() == wanted


def test_levels_travel_to_the_layer_that_adds_them_and_no_further():
    """What is reserved holds all that travel, and refuses more."""
    model, batch = tiny_model(), batch_of(("image",))
    tokens, visual = batch["input_ids"].size, len(batch["visual_update_indices"])
    shapes = [VLStage(model, range(i, i + 1)).input_shape(batch)[0] for i in (1, 2)]
    assert shapes == [tokens + visual, tokens]
    stage = VLStage(model, range(1, 3))

    def reserved(more_tokens: int, more_visual: int):
        sizes = SimpleNamespace(tokens=tokens + more_tokens, visual=visual + more_visual)
        return stage.reserved_shape(batch, sizes)

    assert reserved(5, 1) == (tokens + 5 + visual + 1, 16)
    assert reserved(0, 0) == stage.input_shape(batch)
    for less, setting in (((-1, 0), f"token_rows={tokens}"), ((0, -1), f"visual_rows={visual}")):
        with pytest.raises(ValueError, match=f"set parallel.pp_{setting} or more"):
            reserved(*less)
    batch = batch | {"visual_update_indices": None}
    with pytest.raises(ValueError, match="needs visual_update_indices and .* in a pipeline"):
        stage.input_shape(batch)


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_holds_its_own_parameters_only(tied):
    config = tiny_config().with_tie(tied)
    paddle.seed(0)
    whole = Qwen3VLForConditionalGeneration.from_config(config)
    drawn, held, ties = dict(whole.hf_named_parameters()), [], []
    for part in (
        StageLayers(layers=frozenset({0, 1}), head=False),
        StageLayers(embedding=False, layers=frozenset({2})),
    ):
        paddle.seed(0)
        model = Qwen3VLForConditionalGeneration.from_config(config, SingleDevicePlacement(part))
        held.append(dict(model.hf_named_parameters()))
        table = model.placement.parameter_table
        ties.append({name: table[parameter].tie for name, parameter in held[-1].items()})
        assert model.whole_shapes() == whole.whole_shapes()
        for name, parameter in held[-1].items():
            np.testing.assert_array_equal(parameter.numpy(), drawn[name].numpy(), err_msg=name)
    shared = {"model.language_model.embed_tokens.weight"} if tied else set()
    assert held[0].keys() | held[1].keys() == drawn.keys()
    assert held[0].keys() & held[1].keys() == shared
    for number, tie in enumerate((Tie.OWNER, Tie.COPY)):
        assert {name for name, found in ties[number].items() if found is tie} == shared


def test_costs_count_the_head_the_tower_and_the_experts_that_a_token_sees():
    layers, tower, head = layer_costs(tiny_config())
    attention, dense = 2 * 16 * 6 * 8, 3 * 16 * 24
    assert layers == [attention + dense] * 3
    assert head == 16 * 64
    assert tower == 0.5 * 4 * 2 * (4 * 16 * 16 + 2 * 16 * 24)
    sparse = 16 * (3 * 2 * 8 + 6)
    layers, *_ = layer_costs(tiny_config(**EXPERTS))
    assert layers == [attention + each for each in (sparse, dense, sparse)]


def values(shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of very different magnitude with all bits in use."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=shape) * 10.0 ** rng.integers(-6, 7, size=shape)
    return numbers.astype(np.float32)


@pytest.mark.parametrize("dtype", [paddle.float32, paddle.bfloat16])
@pytest.mark.parametrize("shape", [(2, 6), (2, 128), (1,)])
def test_float32_values_come_back_to_the_bit(dtype, shape):
    wanted = values(shape)
    rows = float32_to_rows(paddle.to_tensor(wanted), 16, dtype)
    assert rows.dtype == dtype
    assert rows.shape == [num_float32_rows(shape, 16, dtype), 16]
    np.testing.assert_array_equal(float32_from_rows(rows, shape).numpy(), wanted)


def test_their_gradient_passes():
    x, weight = paddle.to_tensor(values((2, 6))), paddle.to_tensor(values((2, 6)))
    x.stop_gradient = False
    (float32_from_rows(float32_to_rows(x, 5, paddle.float32), (2, 6)) * weight).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), weight.numpy())


# The colocated schedule.


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_items_of_batches_on_the_device_are_encoded_without_a_copy(kinds):
    batch, encoder = batch_of(kinds), VisualEncoder(colocated_model())
    there = on_device(batch_of(kinds, encoder.vision))
    items = np.arange(len(encoder.items(batch)[0]))
    for own in ([items, items], [items[::2], items[1:]], [items[:0], items[-1:]]):
        # Makes tables, in the first call.
        wanted = encoder.encode([batch, batch], own)
        with record_device_copies() as copies:
            found = encoder.encode([there, there], own)
        assert copies == []
        np.testing.assert_array_equal(found.numpy(), wanted.numpy())
        with record_device_copies() as copies, pinned_on_a_cpu():
            found = encoder.encode([batch, batch], own)
        assert copies == []
        np.testing.assert_array_equal(found.numpy(), wanted.numpy())


@pytest.mark.parametrize("used", [{1}, {0, 1}])
def test_offloaded_rows_leave_the_device_between_micro_batches(used):
    """In the same host memory in every step, unless there are more rows."""
    host = HostRows()
    first = host_addresses(host, [2, 0, 4], used)
    assert host_addresses(host, [2, 0, 3], used) == first
    assert host_addresses(host, [2, 0, 5], used)[0] == first[0]


def host_addresses(host: HostRows, counts: list[int], used: set[int]) -> list[int]:
    full = paddle.arange(4 * sum(counts), dtype="float32").reshape([-1, 4])
    leaves = Leaves(full, counts, [2, 2], used, needs_gradient=True, host_rows=host)
    assert not leaves._leaves
    assert leaves.sections(1, used) == {}
    rows = paddle.concat([*leaves.sections(2, used).values()], axis=1)
    assert [leaf.shape for leaf in leaves._leaves.values()] == [[counts[2], 2]] * len(used)
    (rows * rows).sum().backward()
    leaves.collect()
    assert not leaves._leaves
    wanted = np.zeros([sum(counts), 4], dtype=np.float32)
    wanted[2:, 2 * min(used) :] = 2 * full.numpy()[2:, 2 * min(used) :]
    np.testing.assert_array_equal(leaves.gradient().numpy(), wanted)
    return [buffer.data_ptr() for buffer in host._buffers.values()]


def test_a_batch_says_whether_any_rank_has_items_and_gets_no_dummy_image():
    model, adapter, batch = colocated_model(), ColocatedBatchAdapter(), batch_of(())
    encoder = VisualEncoder(model)
    for count in (0, 3):
        synchronized = adapter.synchronized(batch, [count], model)
        assert "pixel_values" not in synchronized
        assert encoder.has_items_anywhere(synchronized) == bool(count)
        assert "num_ranks_with_visual" not in encoder.language_batch(synchronized, {})


def test_sizes_of_the_tower_that_its_ranks_divide():
    config = tiny_config()
    vision = replace(config.vision_config, hidden_size=24, num_heads=3, intermediate_size=40)
    widths = encoder_shape(replace(config, vision_config=vision)).widths
    assert sorted(widths.values()) == [3, 40, 96]


def test_settings_of_the_encoder_need_the_schedule_and_a_family_that_has_it(tmp_path):
    colocated, file = "parallel.schedule=colocated", write_tiny_run(tmp_path)
    captioner = write_captioner_run(tmp_path / "captioner")
    for run_file, settings, message in (
        (file, ["parallel.encoder.mp_degree=2"], "encoder is .*mp_degree.*schedule is plain"),
        (file, [colocated, "parallel.vision=replicate"], r"vision is replicate but parallel.sched"),
        (captioner, [colocated], r"colocated, which captioner does not support yet: set parallel"),
    ):
        with pytest.raises(ValueError, match=message):
            load_run_config(run_file, settings)
