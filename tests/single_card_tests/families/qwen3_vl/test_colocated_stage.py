"""The colocated schedule of Qwen3-VL and Qwen3.5 on one device: encoder, stages, settings.

Guarantees: the encoder's rows, in any division of the items, and stages that take them with the
batch give the full model's loss and every gradient, for images, videos and both; no level travels
between stages; each section goes to the stage that uses it; offloaded rows are on the device only
while a micro-batch runs; items of batches on the device are encoded without a copy, and those of
host arrays with copies through pinned memory alone; a family without the schedule refuses it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_vl.batch.positions import mrope_position_ids
from paddle_vl.batch.schema import VLBatch
from paddle_vl.batch.visual_index import host_visual_indices
from paddle_vl.config.load import load_run_config
from paddle_vl.families.vlm.inputs.collate import prepared
from paddle_vl.families.vlm.recipe import encoder_shape
from paddle_vl.families.vlm.training.colocated import (
    ColocatedBatchAdapter,
    ColocatedStage,
    VisualEncoder,
)
from paddle_vl.nn.placement import SingleDevicePlacement, StageLayers
from paddle_vl.nn.transfer import on_device
from paddle_vl.parallel.colocated.host_rows import HostRows
from paddle_vl.parallel.colocated.runner import Leaves
from paddle_vl.testing import record_device_copies, tiny_qwen3_5
from paddle_vl.testing.qwen3_vl import IMAGE, VIDEO, patches, token_rows
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.captioner.run import write_captioner_run
from tests.support.pinned import pinned_on_a_cpu
from tests.support.tiny import tiny_config, tiny_model

GRIDS = {"image": [[1, 2, 4], [1, 4, 2], [1, 2, 2]], "video": [[2, 2, 2], [1, 4, 4]]}
CUTS = [[1, 3], [2, 3], [1, 2, 3]]


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
    counts = {}
    for seed, kind in enumerate(kinds):
        names = {"image": "pixel_values", "video": "pixel_values_videos"}
        batch[names[kind]], batch[f"{kind}_grid_thw"] = patches(GRIDS[kind], seed)
        counts[kind] = int(np.prod(GRIDS[kind], axis=1).sum()) // 4
    batch |= host_visual_indices(
        ids,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        num_image_rows=counts.get("image", 0),
        num_video_rows=counts.get("video", 0),
    )
    ids_of = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    thws = [batch.get(f"{kind}_grid_thw") for kind in GRIDS]
    batch["position_ids"], _ = mrope_position_ids(ids, batch["attention_mask"], *thws, **ids_of)
    batch["num_target_tokens"] = int((batch["labels"][:, 1:] != -100).sum())
    return prepared(batch, vision)


def colocated_model(build: Callable[[], Any] = tiny_model) -> Any:
    """The tiny model with a tower on every stage; all layers, to run the stages in a row."""
    own = build()
    placement = SingleDevicePlacement(StageLayers(encoder_everywhere=True))
    model = type(own)(own.config, placement)
    for mine, theirs in zip(model.parameters(), own.parameters(), strict=True):
        mine.set_value(theirs)
    return model


@pytest.mark.parametrize("kinds", [("image",), ("video",), ("image", "video")], ids=str)
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


@pytest.mark.parametrize("kinds", [("image",), ("video",), ("image", "video"), ()], ids=str)
@pytest.mark.parametrize("ends", CUTS, ids=str)
@pytest.mark.parametrize("build", [tiny_model, tiny_qwen3_5])
def test_rows_and_stages_are_the_full_model(ends, kinds, build):
    batch, model = batch_of(kinds), build()
    wanted = model(**batch).share_of_step(3, 2)
    wanted.backward()
    other = colocated_model(build)
    encoder, ranges = VisualEncoder(other), zip([0, *ends], ends, strict=False)
    stages = [ColocatedStage(other, range(*ends)) for ends in ranges]
    rows, costs = encoder.items(batch)
    assert (costs > 0).all()
    leaves = None
    if kinds:
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
    for stage in stages:
        wanted_sections = encoder.sections_of(stage)
        assert (0 in wanted_sections) == stage.is_first
        sections = {} if leaves is None else leaves.sections(0, wanted_sections)
        stage_batch = encoder.language_batch(batch, sections)
        assert not {"pixel_values", "pixel_values_videos"} & stage_batch.keys()
        if hidden is not None:
            # Token rows only: no level travels.
            assert stage.input_shape(stage_batch) == tuple(hidden.shape)
            assert hidden.shape[0] == batch["input_ids"].size
        hidden = stage(stage_batch, hidden)
    loss = hidden.share_of_step(3, 2)
    np.testing.assert_allclose(loss.numpy(), wanted.numpy(), rtol=1e-6)
    loss.backward()
    if leaves is not None:
        paddle.autograd.backward([full], [leaves.gradient()])
    gradients = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        expected = gradients[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            error = np.abs(parameter.grad.numpy() - expected.numpy()).max()
            assert error <= 1e-5 * np.abs(expected.numpy()).max(), name


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


def test_settings_of_the_encoder_need_the_schedule(tmp_path):
    file = write_tiny_run(tmp_path)
    with pytest.raises(
        ValueError, match=r"parallel\.encoder is .*mp_degree.*2.* but parallel\.schedule is plain"
    ):
        load_run_config(file, ["parallel.encoder.mp_degree=2"])
    with pytest.raises(ValueError, match=r"parallel.vision is replicate but parallel.schedule is"):
        load_run_config(file, ["parallel.schedule=colocated", "parallel.vision=replicate"])
    settings = ["parallel.schedule=colocated", "parallel.pp_degree=2"]
    config = load_run_config(file, [*settings, "parallel.encoder={mp_degree: 2}"])
    assert config.parallel.encoder.mp_degree == 2


def test_a_family_without_the_schedule_refuses_it(tmp_path):
    message = r"parallel.schedule is colocated, which captioner does not support yet: set parallel"
    with pytest.raises(ValueError, match=message):
        load_run_config(write_captioner_run(tmp_path), ["parallel.schedule=colocated"])
