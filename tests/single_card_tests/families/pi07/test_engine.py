"""The decoder of both streams.

Guarantees: both streams in one pass equal the prefix followed by the suffix, with insulation and
without; insulation stops gradients into the prefix; both attention implementations agree wherever a
query sees a key; every parameter is registered once.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.families.pi07.decoder import (
    InterleavedDecoder,
    SuffixView,
    block_mask,
    prefix_positions,
    suffix_mask,
    suffix_positions,
)
from paddle_vl.nn.placement import SingleDevicePlacement
from tests.support.gpu_stubs.attention import FLASH
from tests.support.gpu_stubs.pretended import pretended_gpu
from tests.support.pi07_golden import policy_config

BATCH, LENGTH, STEPS, SEEN = 2, 6, 4, 5


def make_decoder(**settings) -> InterleavedDecoder:
    paddle.seed(0)
    return InterleavedDecoder(
        policy_config().changed(**settings).vlm_config, SingleDevicePlacement()
    )


def streams(decoder, insulated=False):
    """Inputs and views of both streams; the second sample's prefix is left-padded."""
    rng = np.random.default_rng(0)
    inputs = [
        paddle.to_tensor(rng.standard_normal(shape, dtype=np.float32), stop_gradient=False)
        for shape in ((BATCH, LENGTH, 64), (BATCH, STEPS, 32), (BATCH, STEPS, 32))
    ]
    pad = paddle.to_tensor(np.array([[1] * 6, [0, 0, 1, 1, 1, 1]], bool))
    marks = paddle.to_tensor(np.array([[0, 0, 0, 1, 1, 1]] * BATCH))
    prefix_view = decoder.view(prefix_positions(pad), block_mask(pad, marks))
    own_pad, own_marks = (paddle.ones([BATCH, STEPS], dtype=d) for d in ("bool", "int64"))
    seen = pad[:, :SEEN]
    own = decoder.view(suffix_positions(seen, STEPS), suffix_mask(seen, own_pad, own_marks))
    return inputs, prefix_view, SuffixView(own, SEEN, insulated), pad


def gradients(decoder, inputs) -> list[np.ndarray | None]:
    tensors = [*inputs, *decoder.parameters()]
    found = [None if x.grad is None else x.grad.numpy() for x in tensors]
    for x in tensors:
        x.clear_gradient(False)
    return found


def assert_all_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1, np.abs(b).max()))


@pytest.mark.parametrize("insulated", [True, False])
def test_joint_call_equals_two_passes(insulated):
    decoder = make_decoder()
    inputs, prefix_view, suffix_view, _ = streams(decoder, insulated)
    prefix, suffix, cond = inputs
    outputs, found = [], []
    for joint in (True, False):
        if joint:
            output = decoder(prefix, suffix, cond, prefix_view, suffix_view)
            pair = output.prefix, output.suffix
        else:
            first = decoder(prefix, prefix_view=prefix_view, keep=True)
            second = decoder(None, suffix, cond, suffix_view=suffix_view, cache=first.cache)
            pair = first.prefix, second.suffix
        outputs.append([x.numpy() for x in pair])
        sum(x.square().sum() for x in pair).backward()
        found.append(gradients(decoder, inputs))
    assert_all_close(*outputs)
    assert_all_close(*found)


@pytest.mark.parametrize("insulated", [True, False])
def test_insulation_keeps_the_prefix_from_the_suffix(insulated):
    decoder = make_decoder()
    inputs, prefix_view, suffix_view, _ = streams(decoder, insulated)
    decoder(*inputs, prefix_view, suffix_view).suffix.square().sum().backward()
    prefix = inputs[0]
    reached = prefix.grad is not None and bool(prefix.grad.abs().sum() > 0)
    assert reached != insulated
    assert inputs[1].grad.abs().sum() > 0
    weight = decoder.layers[0].backbone_layer.self_attn.qkv_proj.weight
    assert (weight.grad is not None and bool(weight.grad.abs().sum() > 0)) != insulated


def test_implementations_agree_where_a_query_sees_a_key():
    decoder = make_decoder()
    outputs = []
    for kind in ("eager", "sdpa"):
        decoder.attention_implementation = kind
        inputs, prefix_view, suffix_view, pad = streams(decoder)
        outputs.append(decoder(*inputs, prefix_view, suffix_view))
    eager, sdpa = outputs
    real = pad.numpy()
    np.testing.assert_allclose(
        eager.prefix.numpy()[real], sdpa.prefix.numpy()[real], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(eager.suffix.numpy(), sdpa.suffix.numpy(), rtol=1e-4, atol=1e-5)
    assert np.abs(eager.prefix.numpy() - sdpa.prefix.numpy())[~real].max() > 0.01


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_flash_attention_gives_the_same_rows(kind):
    decoder = make_decoder()
    decoder.attention_implementation = kind
    inputs, prefix_view, suffix_view, _ = streams(decoder)
    wanted = decoder(*inputs, prefix_view, suffix_view)
    with pretended_gpu() as calls:
        found = decoder(*inputs, prefix_view, suffix_view)
    for mine, theirs in ((found.prefix, wanted.prefix), (found.suffix, wanted.suffix)):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5)
    assert {call.name for call in calls} <= set(FLASH)


def test_every_parameter_is_registered_once():
    decoder = make_decoder()
    names = [name for name, _ in decoder.named_parameters()]
    # Projections are fused, except for queries, keys and values of the last backbone layer.
    expected = 3 * (10 + 8) + 2 + 3
    assert len(names) == len({id(p) for p in decoder.parameters()}) == expected
    assert all("backbone_layer" in n or "expert_layer" in n for n in names if "layers" in n)
