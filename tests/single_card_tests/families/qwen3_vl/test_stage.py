"""Pipeline stages of a Qwen3-VL, run one after the other on one device.

Guarantees: stages give the unsharded model's loss and every gradient for any cut of the layers,
tied or not, with images and without, with experts and their load-balancing loss; a stage knows the
shape of its input in advance, and refuses a batch beyond the reserved size; a batch on the device
is not read back where the objective allows it there; deepstack levels travel no further than the
layer that adds them; a stage has only its own parameters.

Float32 values in rows of another dtype.

Guarantees: they are read back bit for bit, also from bfloat16 rows, and take the announced number
of rows; their gradient passes unchanged in float32 and is rounded once in bfloat16.
"""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_vl.batch.positions import mrope_position_ids
from paddle_vl.batch.schema import VLBatch
from paddle_vl.batch.visual_index import host_visual_indices
from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration
from paddle_vl.families.vlm.inputs.collate import prepared
from paddle_vl.families.vlm.modeling.model import VLOutput
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
from paddle_vl.testing import record_host_reads
from paddle_vl.testing.qwen3_vl import EXPERTS, IMAGE, VIDEO, patches, token_rows
from tests.support.tiny import tiny_config, tiny_model

CUTS = [[3], [1, 2, 3], [1, 3], [2, 3]]


def batch_of(grids: list[list[int]]) -> VLBatch:
    """Two samples; the first has the images of the grids, with two or more visual tokens each."""
    tokens = [("image", int(np.prod(grid)) // 4) for grid in grids]
    ids = token_rows([1, *tokens, 2, 3], [4, 5, 6])
    batch = {
        "input_ids": ids, "attention_mask": (ids != 0).astype(np.int64),
        "labels": np.where(ids < 60, ids, -100), "has_left_padding": False,
    }  # fmt: skip
    rows = sum(count for _, count in tokens)
    if grids:
        pixels, grid_thw = patches(grids)
        batch |= {"pixel_values": pixels, "image_grid_thw": grid_thw}
        batch |= host_visual_indices(
            ids, image_token_id=IMAGE, video_token_id=VIDEO, num_image_rows=rows
        )
    ids_of = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    grid_thw = batch.get("image_grid_thw")
    batch["position_ids"], _ = mrope_position_ids(ids, batch["attention_mask"], grid_thw, **ids_of)
    batch["num_target_tokens"] = int((batch["labels"][:, 1:] != -100).sum())
    return prepared(batch)


def ranges(ends: list[int]) -> list[range]:
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def loss_through_parts(parts: list[VLStage], batch: VLBatch) -> VLOutput:
    rows = None
    for part in parts:
        if rows is not None:
            assert part.input_shape(batch) == tuple(rows.shape)
        rows = part(batch, rows)
    return rows


# The load-balancing loss is as large as the cross entropy.
BALANCED = EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 4.0}


@pytest.mark.parametrize("ends", CUTS, ids=str)
@pytest.mark.parametrize("grids", [[[1, 2, 4], [1, 4, 2]], []], ids=["images", "text"])
@pytest.mark.parametrize("text", [{}, BALANCED], ids=["dense", "experts"])
def test_parts_in_a_row_are_the_whole_model(ends, grids, text):
    """With the loss weights and the sums of sources."""
    batch = batch_of(grids)
    numbers_N = np.arange(batch["target_rows"].shape[1])
    batch |= {"target_weights": (1 + numbers_N % 3).astype("float32")}
    batch |= {"target_sources": numbers_N % 2, "num_sources": 2}
    model = tiny_model(**text)
    whole = model(**batch)
    wanted = whole.share_of_step(3, 2)
    wanted.backward()
    gradients = {n: p.grad for n, p in model.hf_named_parameters()}
    other = tiny_model(**text)
    parts = [VLStage(other, layers) for layers in ranges(ends)]
    output = loss_through_parts(parts, batch)
    assert (output.aux_loss is not None) == bool(text)
    loss = output.share_of_step(3, 2)
    loss.backward()
    np.testing.assert_allclose(loss.numpy(), wanted.numpy(), rtol=1e-6)
    np.testing.assert_allclose(output.source_sums.numpy(), whole.source_sums.numpy(), rtol=1e-6)
    for name, parameter in other.hf_named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None, name
            continue
        scale = np.abs(gradients[name].numpy()).max()
        error = np.abs(parameter.grad.numpy() - gradients[name].numpy()).max()
        assert error <= 1e-6 * max(scale, 1e-6), name


def test_parts_do_not_read_a_batch_back_from_the_device():
    batch, model = batch_of([[1, 2, 4], [1, 4, 2]]), tiny_model()
    parts = [VLStage(model, layers) for layers in ranges([1, 3])]
    wanted = loss_through_parts(parts, batch).loss_sum.item()
    there = on_device(batch)
    with record_host_reads() as reads:
        output = loss_through_parts(parts, there)
    assert reads == []
    assert output.loss_sum.item() == wanted


def test_levels_travel_to_the_layer_that_adds_them_and_no_further():
    model, batch = tiny_model(), batch_of([[1, 2, 4]])
    tokens, visual = batch["input_ids"].size, len(batch["visual_update_indices"])
    shapes = [VLStage(model, range(i, i + 1)).input_shape(batch)[0] for i in (1, 2)]
    assert shapes == [tokens + visual, tokens]


def test_what_is_reserved_holds_every_level_that_travels_and_refuses_more():
    part, batch = VLStage(tiny_model(), range(1, 3)), batch_of([[1, 2, 4]])
    tokens, visual = batch["input_ids"].size, len(batch["visual_update_indices"])
    roomy = SimpleNamespace(tokens=tokens + 5, visual=visual + 1)
    assert part.reserved_shape(batch, roomy) == (tokens + 5 + visual + 1, 16)
    exact = SimpleNamespace(tokens=tokens, visual=visual)
    assert part.reserved_shape(batch, exact) == part.input_shape(batch)
    with pytest.raises(ValueError, match=f"set parallel.pp_token_rows={tokens} or more"):
        part.reserved_shape(batch, SimpleNamespace(tokens=tokens - 1, visual=visual))
    with pytest.raises(ValueError, match=f"set parallel.pp_visual_rows={visual} or more"):
        part.reserved_shape(batch, SimpleNamespace(tokens=tokens, visual=visual - 1))


@pytest.mark.parametrize("tied", [True, False])
def test_a_part_holds_its_own_parameters_only(tied):
    config = tiny_config().with_tie(tied)
    whole = Qwen3VLForConditionalGeneration.from_config(config)
    parts = [
        StageLayers(layers=frozenset({0, 1}), head=False),
        StageLayers(embedding=False, layers=frozenset({2})),
    ]
    held, ties = [], []
    for part in parts:
        paddle.seed(0)
        model = Qwen3VLForConditionalGeneration.from_config(config, SingleDevicePlacement(part))
        held.append(dict(model.hf_named_parameters()))
        table = model.placement.parameter_table
        ties.append({name: table[parameter].tie for name, parameter in held[-1].items()})
        assert model.whole_shapes() == {
            item.key: item.stored_shape for item in whole.stored_parameters()
        }
    keys = {name for name, _ in whole.hf_named_parameters()}
    shared = {"model.language_model.embed_tokens.weight"} if tied else set()
    assert held[0].keys() | held[1].keys() == keys
    assert held[0].keys() & held[1].keys() == shared
    for name in shared:
        np.testing.assert_array_equal(held[0][name].numpy(), held[1][name].numpy())
    for number, tie in enumerate((Tie.OWNER, Tie.COPY)):
        assert {name for name, found in ties[number].items() if found is tie} == shared
    paddle.seed(0)
    drawn = dict(Qwen3VLForConditionalGeneration.from_config(config).hf_named_parameters())
    for part in held:
        for name, parameter in part.items():
            np.testing.assert_array_equal(parameter.numpy(), drawn[name].numpy(), err_msg=name)


def test_a_batch_without_indices_is_refused():
    batch = batch_of([[1, 2, 4]]) | {"visual_update_indices": None}
    with pytest.raises(ValueError, match="needs visual_update_indices and .* in a pipeline"):
        VLStage(tiny_model(), range(1, 3)).input_shape(batch)


def test_costs_count_the_head_and_the_tower():
    config = tiny_config()
    layers, tower, head = layer_costs(config)
    assert layers == [2 * 16 * 6 * 8 + 3 * 16 * 24] * 3
    assert head == 16 * 64
    assert tower == 0.5 * 4 * 2 * (4 * 16 * 16 + 2 * 16 * 24)


DTYPES = [paddle.float32, paddle.bfloat16]


def values(shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of very different magnitude with all bits in use."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=shape) * 10.0 ** rng.integers(-6, 7, size=shape)
    return numbers.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 6), (2, 128), (1,)])
def test_values_come_back_to_the_bit(dtype, shape):
    wanted = values(shape)
    rows = float32_to_rows(paddle.to_tensor(wanted), 16, dtype)
    assert rows.dtype == dtype
    assert rows.shape == [num_float32_rows(shape, 16, dtype), 16]
    np.testing.assert_array_equal(float32_from_rows(rows, shape).numpy(), wanted)


def test_the_gradient_passes():
    x, weight = paddle.to_tensor(values((2, 6))), paddle.to_tensor(values((2, 6)))
    x.stop_gradient = False
    (float32_from_rows(float32_to_rows(x, 5, paddle.float32), (2, 6)) * weight).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), weight.numpy())
