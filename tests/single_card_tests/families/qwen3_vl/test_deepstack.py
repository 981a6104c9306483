"""Deepstack levels in the decoder.

Guarantees: a level costs one indexed add, in eager and traced programs; levels are added after the
first layers, on visual rows only; the decoder reads nothing on the host; two seeded runs are
bit-identical.
"""

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

from paddle_vl.export import tracing as _tracing  # noqa: F401  Excepts code from conversion.
from paddle_vl.families.vlm.layers import DeepstackLayer
from paddle_vl.testing import forbid_host_reads
from paddle_vl.testing.qwen3_vl import patches, token_rows
from tests.support.tiny import tiny_model

GRIDS = [[1, 4, 4], [1, 2, 4]]
IDS = token_rows([1, ("image", 4), 2, 3], [4, 5, ("image", 2), 6])


def batch() -> dict:
    pixels, grid = patches(GRIDS)
    return {"input_ids": IDS, "labels": IDS, "pixel_values": pixels, "image_grid_thw": grid}


def test_a_traced_level_is_one_indexed_add():
    layer = DeepstackLayer()
    traced = paddle.jit.to_static(
        layer,
        full_graph=True,
        input_spec=[
            InputSpec([None, 8], "float32", "x"),
            InputSpec([None, 8], "float32", "level"),
            InputSpec([None], "int64", "update"),
        ],
    )
    operators = [
        op.name() for op in traced.forward.concrete_program.main_program.global_block().ops
    ]
    inert = {"pd_op.data", "builtin.shadow_output", "pd_op.fetch"}
    assert [name for name in operators if name not in inert] == ["pd_op.index_add"]


def test_each_level_is_added_once_after_its_layer(monkeypatch):
    model = tiny_model()
    adds = []
    plain = paddle.index_add

    def counting(x, index, axis, value):
        adds.append((len(layers_done), axis))
        return plain(x, index, axis, value)

    layers_done = []
    for layer in model.decoder_layers:
        layer.register_forward_post_hook(lambda *_: layers_done.append(1))
    monkeypatch.setattr(paddle, "index_add", counting)
    model(**batch())
    assert adds == [(1, 0), (2, 0)]


def test_a_level_touches_visual_rows_only_and_reaches_the_mergers():
    x = paddle.zeros([6, 2])
    level = paddle.ones([2, 2])
    level.stop_gradient = False
    out = DeepstackLayer()(x, level, paddle.to_tensor([1, 4]))
    assert out.numpy()[:, 0].tolist() == [0, 1, 0, 0, 1, 0]
    (out * 3).sum().backward()
    assert (level.grad.numpy() == 3).all()
    model = tiny_model()
    model(**batch()).loss.backward()
    for merger in model.visual.deepstack_merger_list:
        assert float(merger.linear_fc2.weight.grad.abs().max()) > 0


@pytest.mark.parametrize(
    "read", [lambda x: x.item(), lambda x: x.tolist(), lambda x: x.numpy(), bool, int, float]
)
def test_the_guard_against_host_reads_notices_each_kind(read):
    with forbid_host_reads(), pytest.raises(AssertionError, match="host read"):
        read(paddle.ones([]))


def test_decoder_forward_and_backward_read_nothing_on_the_host():
    model = tiny_model()
    args = model.encode_visual(paddle.to_tensor(batch()["pixel_values"]), batch()["image_grid_thw"])
    position_ids, _ = model.position_ids(IDS, image_grid_thw=batch()["image_grid_thw"])
    args |= {"input_ids": paddle.to_tensor(IDS), "position_ids": paddle.to_tensor(position_ids)}
    with forbid_host_reads():
        hidden = model.language_model(args)
        model.lm_head(hidden).sum().backward()
    assert model.visual.patch_embed.weight.grad is not None


def test_two_seeded_runs_are_bit_identical():
    def run():
        model = tiny_model(seed=3)
        model(**batch()).loss.backward()
        return [parameter.grad.numpy() for parameter in model.parameters()]

    for first, second in zip(run(), run(), strict=True):
        np.testing.assert_array_equal(first, second)
