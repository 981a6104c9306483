"""The visual inputs of GPTEmbedding and DeepstackLayer: what fits, and what is refused.

Guarantees: places from a mask, from ids and from indices give the same outputs; HF's levels in
reading order are taken; levels are cast; every input that does not fit in shape, dtype or name is a
ValueError with both numbers, found by shapes alone. Values are in test_visual_values.py.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.families.vlm.modeling.layers import DeepstackLayer
from paddle_vl.nn.attention import RotaryTables
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.testing import MockedSequenceParallel, forbid_host_reads
from tests.single_card_tests.families.qwen3_vl.embedding_inputs import (
    IMAGES,
    MIXED,
    WIDTH,
    build,
    carried,
    masked_args,
    visual_args,
)


def test_indices_of_another_batch_are_refused():
    args = visual_args(MIXED) | carried(MIXED)
    args["image_embeds"] = args["image_embeds"][:-1]
    args["deepstack_image_embeds"] = [level[:-1] for level in args["deepstack_image_embeds"]]
    with pytest.raises(ValueError, match="12 token rows but the batch has 11 visual embeddings"):
        build()(args)


def test_half_a_pair_of_indices_is_refused():
    indices = carried(MIXED)
    del indices["visual_gather_indices"]
    with pytest.raises(ValueError, match="without visual_gather_indices"):
        build()(visual_args(MIXED) | indices)
    indices = carried(MIXED)
    del indices["visual_source_indices"]
    with pytest.raises(ValueError, match="without visual_source_indices: add them"):
        build()(visual_args(MIXED) | indices)


def levels_of(count: int, rows: int, width: int = WIDTH, dtype: str = "float32") -> list:
    return [paddle.ones([rows, width], dtype) for _ in range(count)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"deepstack_image_embeds": None}, "deepstack_image_embeds has 0 levels .* 2"),
        ({"deepstack_image_embeds": levels_of(1, 6)}, "deepstack_image_embeds has 1 levels .* 2"),
        ({"deepstack_image_embeds": levels_of(3, 6)}, "deepstack_image_embeds has 3 levels .* 2"),
        ({"deepstack_video_embeds": None}, "deepstack_video_embeds has 0 levels .* 2"),
        (
            {"deepstack_image_embeds": paddle.ones([2, 6, WIDTH])},
            "deepstack_image_embeds has Tensor for levels .* 2",
        ),
        (
            {"deepstack_image_embeds": levels_of(2, 5)},
            r"deepstack_image_embeds\[0\] is .* \[5, 16\]: .* shape \[6, 16\]; .* one row per",
        ),
        (
            {"deepstack_video_embeds": levels_of(1, 6) + levels_of(1, 7)},
            r"deepstack_video_embeds\[1\] is .* \[7, 16\]: .* shape \[6, 16\]; .* one row per",
        ),
        (
            {"deepstack_image_embeds": levels_of(2, 6, width=8)},
            r"deepstack_image_embeds\[0\] is .* of shape \[6, 8\]: .* \[6, 16\]",
        ),
        (
            {"deepstack_image_embeds": levels_of(2, 6, dtype="int32")},
            r"deepstack_image_embeds\[0\] is int32 .* must be float ",
        ),
        ({"image_embeds": paddle.ones([6])}, r"image_embeds is .* of shape \[6\]"),
        ({"image_embed": paddle.ones([6, WIDTH])}, "'image_embed'; it takes image_embeds"),
        (
            {"deepstack_visual_embeds": levels_of(2, 12)},
            "3 lists of deepstack levels are given .* one of all visual tokens",
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 2], ids=["plain", "mp-rank"])
@pytest.mark.parametrize("with_indices", [False, True], ids=["computed", "carried"])
def test_visual_inputs_that_do_not_fit_are_refused(changed, message, size, with_indices):
    placement = MockedSequenceParallel(1, size) if size > 1 else SingleDevicePlacement()
    args = visual_args(MIXED)
    if with_indices:
        args |= carried(MIXED, placement.ops.row_part)
    with forbid_host_reads(), pytest.raises(ValueError, match=message):
        build(placement)(args | changed)


def test_levels_without_merged_rows_are_refused():
    args = visual_args(IMAGES)
    del args["image_embeds"]
    with pytest.raises(ValueError, match="has 2 levels but there is no image_embeds"):
        build()(args)
    args = visual_args(IMAGES)
    args["deepstack_visual_embeds"] = args.pop("deepstack_image_embeds")
    del args["image_embeds"]
    with pytest.raises(ValueError, match="without merged visual rows: .* decoder_input"):
        build()(args)


@pytest.mark.parametrize("name", ["update", "gather", "source"])
def test_indices_of_another_rank_or_dtype_are_refused(name):
    for changed in (lambda index: index.astype("int32"), lambda index: index.reshape([-1, 1])):
        indices = carried(MIXED)
        indices[f"visual_{name}_indices"] = changed(indices[f"visual_{name}_indices"])
        with pytest.raises(
            ValueError, match=rf"visual_{name}_indices is .* must be int64 of shape \[1?[M2]\]"
        ):
            build()(visual_args(MIXED) | indices)
    indices = carried(MIXED)
    indices[f"visual_{name}_indices"] = indices[f"visual_{name}_indices"][:-1]
    with pytest.raises(
        ValueError,
        match=r"indices is int64 of shape \[1[12]\]: it must be int64 of shape \[1[12]\]",
    ):
        build()(visual_args(MIXED) | indices)


def test_a_shard_with_more_rows_than_the_batch_has_embeddings_is_refused():
    args = visual_args(MIXED) | carried(MIXED)
    placement = MockedSequenceParallel(0, 2)
    for kind in ("image", "video"):
        args[f"{kind}_embeds"] = args[f"{kind}_embeds"][:2]
        args[f"deepstack_{kind}_embeds"] = [x[:2] for x in args[f"deepstack_{kind}_embeds"]]
    with pytest.raises(ValueError, match="12 token rows but the batch has 4 visual embeddings"):
        build(placement)(args)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_levels_are_cast_as_merged_rows_are(dtype):
    args = visual_args(MIXED)
    wanted = build()(args)
    for name in ("image", "video"):
        args[f"{name}_embeds"] = args[f"{name}_embeds"].astype(dtype)
        levels = args[f"deepstack_{name}_embeds"]
        args[f"deepstack_{name}_embeds"] = [level.astype(dtype) for level in levels]
    found = build()(args)
    for tensor in (found["hidden_states"], *found["deepstack_visual_emb"]):
        assert tensor.dtype == paddle.float32
    for level, other in zip(
        found["deepstack_visual_emb"], wanted["deepstack_visual_emb"], strict=True
    ):
        np.testing.assert_allclose(level.numpy(), other.numpy(), rtol=1e-2, atol=1e-2)


def assert_equal_outputs(found: dict, wanted: dict) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        tensors = (
            zip(found[name], value, strict=True)
            if isinstance(value, list | tuple | RotaryTables)
            else [(found[name], value)]
        )
        for tensor, other in tensors:
            assert tensor.numpy().tolist() == other.numpy().tolist(), name


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_mask_takes_the_place_of_input_ids(size):
    args = visual_args(IMAGES)
    for rank in range(size):
        placement = MockedSequenceParallel(rank, size) if size > 1 else None
        wanted = build(placement)(args)
        with forbid_host_reads():
            found = build(placement)(masked_args(IMAGES, args))
        assert_equal_outputs(found, wanted)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["deepstack_visual_embeds", "deepstack_visual_emb"])
@pytest.mark.parametrize("places", ["ids", "mask", "indices"])
def test_levels_in_reading_order_stand_beside_hidden_states_with_visual_rows(size, name, places):
    """As HF's text model takes them: `inputs_embeds`, `visual_pos_masks` and the levels."""
    args = visual_args(MIXED)
    whole = build()(args)
    for rank in range(size):
        placement = MockedSequenceParallel(rank, size) if size > 1 else SingleDevicePlacement()
        wanted = build(placement)(args)
        given = {
            "position_ids": args["position_ids"],
            "decoder_input": whole["hidden_states"].reshape([*MIXED.shape, WIDTH]),
            name: whole["deepstack_visual_emb"],
        }
        if places == "ids":
            given["input_ids"] = args["input_ids"]
        elif places == "mask":
            given["visual_pos_masks"] = whole["visual_pos_masks"]
        else:
            given |= carried(MIXED, placement.ops.row_part)
            wanted.pop("visual_pos_masks")
        with forbid_host_reads():
            found = build(placement)(given)
        assert_equal_outputs(found, wanted)


def test_levels_in_reading_order_fit_embeddings_by_modality():
    args = visual_args(MIXED)
    wanted = build()(args)
    given = {name: value for name, value in args.items() if not name.startswith("deepstack")}
    for indices in ({}, carried(MIXED)):
        given["deepstack_visual_embeds"] = wanted["deepstack_visual_emb"]
        assert_equal_outputs(build()(given | indices), wanted)


def test_masks_that_do_not_fit_are_refused():
    args = masked_args(IMAGES, visual_args(IMAGES))
    mask_BL = args["visual_pos_masks"]
    for wrong, message in (
        (mask_BL.astype("int64"), "visual_pos_masks is int64"),
        (mask_BL.reshape([-1]), r"of shape \[48\]: it must be bool of shape \[3, 16\]"),
        (mask_BL[:, :8], r"of shape \[3, 8\]: it must be bool of shape \[3, 16\]"),
        (mask_BL.transpose([1, 0]), r"of shape \[16, 3\]: it must be bool of shape \[3, 16\]"),
    ):
        with pytest.raises(ValueError, match=message):
            build()(args | {"visual_pos_masks": wrong})
    with pytest.raises(ValueError, match="does not tell 6 image from 6 video embeddings"):
        build()(masked_args(MIXED, visual_args(MIXED)))


def test_embeddings_without_places_are_refused():
    args = masked_args(IMAGES, visual_args(IMAGES))
    del args["visual_pos_masks"]
    with pytest.raises(ValueError, match="places of 12 visual embeddings are unknown"):
        build()(args)


def test_hidden_states_of_another_batch_are_refused():
    args = masked_args(IMAGES, visual_args(IMAGES))
    with pytest.raises(ValueError, match=r"shape \[3, 15, 16\]: .* position_ids are of 3 x 16 tok"):
        build()(args | {"decoder_input": args["decoder_input"][:, :15]})
    with pytest.raises(
        ValueError, match=r"\[16, 3, 16\]: .* shape \[3, 16, 16\] or \[48, 16\]; .* first"
    ):
        build()(args | {"decoder_input": args["decoder_input"].transpose([1, 0, 2])})
    with pytest.raises(ValueError, match=r"decoder_input is .* of shape \[3, 16, 8\]"):
        build()(args | {"decoder_input": args["decoder_input"][:, :, :8]})
    with pytest.raises(ValueError, match=r"decoder_input is int64 .* must be float "):
        build()(args | {"decoder_input": args["decoder_input"].astype("int64")})
    with pytest.raises(ValueError, match=r"input_ids is .* shape \[16, 3\]: .* shape \[3, 16\];"):
        build()(args | {"input_ids": paddle.to_tensor(IMAGES.T)})
    del args["decoder_input"]
    with pytest.raises(ValueError, match="neither input_ids nor decoder_input"):
        build()(args)


@pytest.mark.parametrize(
    ("hidden", "level", "update", "message"),
    [
        ([8, 4], [3, 4], [2], r"level is .* \[3, 4\]: it must be float32 of shape \[2, 4\]"),
        ([8, 4], [3, 5], [3], r"level is .* \[3, 5\]: it must be float32 of shape \[3, 4\]"),
        ([2, 4, 4], [3, 4], [3], r"a layer's input is .* \[2, 4, 4\]"),
        ([8, 4], [3], [3], r"level is .* \[3\]"),
        ([8, 4], [3, 4], [3, 1], r"visual_update_indices is .* of shape \[3, 1\]"),
    ],
)
def test_a_deepstack_layer_checks_its_three_shapes(hidden, level, update, message):
    layer = DeepstackLayer()
    with pytest.raises(ValueError, match=message):
        layer(paddle.zeros(hidden), paddle.zeros(level), paddle.zeros(update, "int64"))


def test_a_deepstack_layer_refuses_other_dtypes():
    x_TD, update_M = paddle.zeros([8, 4]), paddle.zeros([3], "int64")
    with pytest.raises(ValueError, match="level is float64 .* must be float32"):
        DeepstackLayer()(x_TD, paddle.zeros([3, 4], "float64"), update_M)
    with pytest.raises(ValueError, match="visual_update_indices is int32"):
        DeepstackLayer()(x_TD, paddle.zeros([3, 4]), update_M.astype("int32"))
