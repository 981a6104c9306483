"""The visual inputs of GPTEmbedding and DeepstackLayer: what fits, and what is refused by shapes
alone. Values are in test_visual_values.py."""

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


def turned(name: str, change):
    """The inputs with a mask, of which one is changed."""
    args = masked_args(IMAGES, visual_args(IMAGES))
    return args | {name: change(args.get(name))}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("visual_pos_masks", lambda x: x.astype("int64"), "visual_pos_masks is int64"),
        ("visual_pos_masks", lambda x: x.transpose([1, 0]), r"\[16, 3\]: it must be bool of shape"),
        ("visual_pos_masks", lambda _: None, "places of 12 visual embeddings are unknown"),
        ("image_embeds", lambda _: None, "has 2 levels but there is no image_embeds"),
        ("decoder_input", lambda x: x[:, :15], r"shape \[3, 15, 16\]: .* are of 3 x 16 tok"),
        ("decoder_input", lambda x: x.transpose([1, 0, 2]), r"\[16, 3, 16\]: .* or \[48, 16\]; "),
        ("decoder_input", lambda x: x[:, :, :8], r"decoder_input is .* of shape \[3, 16, 8\]"),
        ("decoder_input", lambda x: x.astype("int64"), "decoder_input is int64 .* must be float "),
        ("decoder_input", lambda _: None, "neither input_ids nor decoder_input"),
        ("input_ids", lambda _: paddle.to_tensor(IMAGES.T), r"input_ids is .* shape \[16, 3\]: "),
    ],
)
def test_masks_and_hidden_states_that_do_not_fit_are_refused(name, change, message):
    args = {key: value for key, value in turned(name, change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        build()(args)


def test_a_mask_does_not_tell_images_from_videos():
    with pytest.raises(ValueError, match="does not tell 6 image from 6 video embeddings"):
        build()(masked_args(MIXED, visual_args(MIXED)))


@pytest.mark.parametrize(
    ("hidden", "level", "update", "dtypes", "message"),
    [
        ([8, 4], [3, 4], [2], (), r"level is .* \[3, 4\]: it must be float32 of shape \[2, 4\]"),
        ([2, 4, 4], [3, 4], [3], (), r"a layer's input is .* \[2, 4, 4\]"),
        ([8, 4], [3, 4], [3, 1], (), r"visual_update_indices is .* of shape \[3, 1\]"),
        ([8, 4], [3, 4], [3], ("float64", "int64"), "level is float64 .* must be float32"),
        ([8, 4], [3, 4], [3], ("float32", "int32"), "visual_update_indices is int32"),
    ],
)
def test_a_deepstack_layer_checks_its_inputs(hidden, level, update, dtypes, message):
    of_level, of_update = dtypes or ("float32", "int64")
    tensors = paddle.zeros(hidden), paddle.zeros(level, of_level), paddle.zeros(update, of_update)
    with pytest.raises(ValueError, match=message):
        DeepstackLayer()(*tensors)
