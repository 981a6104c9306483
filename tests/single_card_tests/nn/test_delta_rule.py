"""The gated delta rule, its convolution and its gated norm, against recurrences in float64.

Launches are those of docs/gpu.md.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_vl.nn.attention import PackedSamples
from paddle_vl.nn.delta_rule import (
    CHUNK,
    causal_conv_silu,
    chunked_size,
    gated_delta_rule,
    gated_rms_norm,
)
from tests.support.implementations import implementation

B, K, N, C, V = 2, 2, 4, 8, 6
RNG = np.random.default_rng(0)


@pytest.fixture(params=["plain", "cpu", "compiled"], autouse=True)
def kernels(request):
    with implementation(request.param):
        yield


def inputs(length: int, seed: int = 0, decay: float = 0.2) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(B, length, K, C)) for _ in range(2))
    v = rng.normal(size=(B, length, N, V))
    g = -decay * rng.exponential(size=(B, length, N))
    beta = 1 / (1 + np.exp(-rng.normal(size=(B, length, N))))
    return [x.astype(np.float32) for x in (q, k, v, g, beta)]


def recurrence(
    arrays: Sequence[np.ndarray], starts: Sequence[int] = (), state: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and final states, a token at a time, in float64."""
    q, k, v, g, beta = (x.astype(np.float64) for x in arrays)
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = ((x * scale).repeat(N // K, axis=2) for x, scale in ((q, C**-0.5), (k, 1.0)))
    states = np.zeros([B, N, C, V]) if state is None else state.astype(np.float64)
    out = np.zeros(v.shape)
    for t in range(q.shape[1]):
        for b in range(B):
            if b * q.shape[1] + t in starts:
                states[b] = 0
        states = states * np.exp(g[:, t, :, None, None])
        held = np.einsum("bncv,bnc->bnv", states, k[:, t])
        delta = beta[:, t, :, None] * (v[:, t] - held)
        states = states + np.einsum("bnc,bnv->bncv", k[:, t], delta)
        out[:, t] = np.einsum("bncv,bnc->bnv", states, q[:, t])
    return out, states


def tensors(arrays: Sequence[np.ndarray]) -> list[paddle.Tensor]:
    return [paddle.to_tensor(x, stop_gradient=False) for x in arrays]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_chunks_equal_the_recurrence(length, has_state, trains):
    arrays = inputs(length)
    state = RNG.normal(size=[B, N, C, V]).astype(np.float32) if has_state else None
    before = None if state is None else paddle.to_tensor(state)
    with paddle.set_grad_enabled(trains):
        out, last = gated_delta_rule(*tensors(arrays), before, keeps_state=True)
    wanted, wanted_last = recurrence(arrays, state=state)
    np.testing.assert_allclose(out.numpy(), wanted, atol=3e-6)
    np.testing.assert_allclose(last.numpy(), wanted_last, atol=3e-6)


OFFSETS = [0, 70, 80, 81, 150, 285, 300]


@pytest.mark.parametrize("trains", [False, True])
def test_packed_samples_equal_the_recurrence_from_zero(trains):
    arrays, length = inputs(150), 150
    packed = PackedSamples(np.array(OFFSETS, np.int32), length)
    with paddle.set_grad_enabled(trains):
        out, states = gated_delta_rule(*tensors(arrays), packed=packed, keeps_state=True)
    wanted, _ = recurrence(arrays, starts=OFFSETS)
    np.testing.assert_allclose(out.numpy(), wanted, atol=3e-6)
    assert states.shape == [len(OFFSETS) - 1, N, C, V]
    for number, (begin, end) in enumerate(pairwise(OFFSETS)):
        row, own = divmod(begin, length)
        # Both rows alike, for the fixed batch of the recurrence.
        piece = [np.stack([x[row, own : own + end - begin]] * B) for x in arrays]
        _, last = recurrence(piece)
        np.testing.assert_allclose(states.numpy()[number], last[0], atol=3e-6)


@pytest.mark.parametrize("packs", [False, True])
def test_gradients_equal_those_of_the_recurrence(packs):
    """Central differences of the float64 recurrence, along random directions."""
    arrays = inputs(150, seed=3)
    packed = PackedSamples(np.array(OFFSETS, np.int32), 150) if packs else None
    starts = OFFSETS if packs else ()
    given = tensors(arrays)
    out, _ = gated_delta_rule(*given, packed=packed)
    direction = RNG.normal(size=out.shape).astype(np.float32)
    (out * paddle.to_tensor(direction)).sum().backward()
    for number, x in enumerate(given):
        along = RNG.normal(size=arrays[number].shape)
        values = []
        for sign in (1e-5, -1e-5):
            moved = [array.astype(np.float64) for array in arrays]
            moved[number] = moved[number] + sign * along
            values.append((recurrence(moved, starts)[0] * direction).sum())
        wanted = (values[0] - values[1]) / 2e-5
        found = float((x.grad.numpy().astype(np.float64) * along).sum())
        scale = np.linalg.norm(x.grad.numpy())
        assert abs(found - wanted) <= 2e-5 * scale, number


def test_nearly_parallel_keys_lose_no_precision():
    """Where an inverse by powers of the strictly lower part is wrong by a factor of 1e9."""
    q, k, v, g, beta = inputs(CHUNK, seed=5)
    k = k[:, :1] + 1e-3 * k
    arrays = [q, k, v, 1e-3 * g, np.full_like(beta, 0.95)]
    out, _ = gated_delta_rule(*tensors(arrays))
    wanted, _ = recurrence(arrays)
    np.testing.assert_allclose(out.numpy(), wanted, atol=2e-5)


@pytest.mark.parametrize("everywhere", [True, False])
def test_strong_decay_gives_finite_values_and_gradients(everywhere):
    arrays = inputs(130, decay=200.0 if everywhere else 0.2)
    if not everywhere:
        # Behind it, differences of float32 sums would be off by 1e-4.
        arrays[3][:, 5] = -1500.0
    given = tensors(arrays)
    out, _ = gated_delta_rule(*given)
    out.sum().backward()
    np.testing.assert_allclose(out.numpy(), recurrence(arrays)[0], atol=3e-6)
    assert all(np.isfinite(x.grad.numpy()).all() for x in given)


def test_rows_before_the_first_token_leave_the_state_zero():
    arrays = inputs(90)
    padded = [np.concatenate([np.zeros_like(x[:, :40]), x], axis=1) for x in arrays]
    # Whatever decay and share are there.
    padded[3][:, :40], padded[4][:, :40] = -0.7, 0.5
    found, state = gated_delta_rule(*tensors(padded), keeps_state=True)
    wanted, last = gated_delta_rule(*tensors(arrays), keeps_state=True)
    np.testing.assert_allclose(found.numpy()[:, 40:], wanted.numpy(), atol=2e-6)
    np.testing.assert_allclose(state.numpy(), last.numpy(), atol=2e-6)


@pytest.mark.parametrize("case", ["plain", "packed", "with a state"])
def test_the_convolution_equals_its_formula(case):
    length, channels, taps = 7, 5, 4
    u = RNG.normal(size=(B, length, channels)).astype(np.float32)
    w = RNG.normal(size=(channels, taps)).astype(np.float32)
    before = RNG.normal(size=(B, taps - 1, channels)).astype(np.float32)
    offsets = np.array([0, 2, 7, 8, 14] if case == "packed" else [0, 7, 14], np.int32)
    y = np.zeros((B * length, channels))
    for begin, end in pairwise(offsets):
        first = before[begin // length] if case == "with a state" else np.zeros_like(before[0])
        seen = np.concatenate([first, u.reshape(-1, channels)[begin:end]])
        for t in range(end - begin):
            y[begin + t] = (w.T * seen[t : t + taps]).sum(axis=0)
    found = causal_conv_silu(
        paddle.to_tensor(u),
        paddle.to_tensor(w),
        paddle.to_tensor(before) if case == "with a state" else None,
        PackedSamples(offsets, length) if case == "packed" else None,
    )
    y = y.reshape(u.shape)
    np.testing.assert_allclose(found.numpy(), y / (1 + np.exp(-y)), atol=1e-6)


@pytest.mark.parametrize("packs", [False, True])
def test_gradients_of_the_convolution_equal_the_plain_ones(packs):
    u, w = RNG.normal(size=(B, 9, 70)).astype(np.float32), RNG.normal(size=(70, 4))
    packed = PackedSamples(np.array([0, 2, 9, 10, 18], np.int32), 9) if packs else None
    direction = paddle.to_tensor(RNG.normal(size=u.shape).astype(np.float32))
    found = []
    for function in (causal_conv_silu, causal_conv_silu.plain):
        given = tensors([u, w.astype(np.float32)])
        (function(*given, None, packed) * direction).sum().backward()
        found.append([x.grad.numpy() for x in given])
    for ours, plain in zip(*found, strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-5)


def test_frozen_inputs_get_no_gradient_and_the_others_theirs():
    arrays, found = inputs(70), []
    for frozen in ([], [0, 2, 4]):
        given = tensors(arrays)
        for number in frozen:
            given[number].stop_gradient = True
        gated_delta_rule(*given)[0].sum().backward()
        assert [x.grad is None for x in given] == [i in frozen for i in range(5)]
        found.append(given)
    for number in (1, 3):
        np.testing.assert_array_equal(*(given[number].grad.numpy() for given in found))


def test_the_gated_norm_equals_its_formula():
    x, gate = (RNG.normal(size=(9, 5)).astype(np.float32) for _ in range(2))
    weight = RNG.normal(size=5).astype(np.float32)
    found = gated_rms_norm(*map(paddle.to_tensor, (x, gate, weight)), 1e-6)
    wanted = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight * gate
    np.testing.assert_allclose(found.numpy(), wanted / (1 + np.exp(-gate)), atol=1e-6)


def test_the_size_counts_the_products():
    # 163,840 operations, two for each multiplication.
    assert chunked_size(128, 128) == 163840 // 2


def test_launches_are_those_of_the_page(kernels, request, capfd):
    """Without views, for 2, 3 and 4 chunks; counted of Paddle's operators."""
    if request.node.callspec.params["kernels"] != "cpu":
        pytest.skip("the page counts the chain of products")
    page = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text(encoding="utf-8")
    row = re.search(r"`gated_delta_rule` \| (\d+) \+ (\d+) S \| (\d+) \+ (\d+) S", page)
    forward, per_step, backward, per_step_back = map(int, row.groups())
    views = {
        "reshape", "slice", "unsqueeze", "squeeze", "transpose", "expand", "full", "full_like",
    }  # fmt: skip

    def launched(call) -> tuple:
        paddle.amp.debugging.enable_operator_stats_collection()
        result = call()
        paddle.amp.debugging.disable_operator_stats_collection()
        lines = re.findall(
            r"^ +(\w+) +\| +(\d+) +\| +(\d+) +\| +(\d+) +\| +(\d+)",
            capfd.readouterr().out,
            re.MULTILINE,
        )
        return result, sum(sum(map(int, n)) for name, *n in lines if name not in views)

    for steps in (2, 3, 4):
        given = tensors(inputs(64 * steps))
        gated_delta_rule(*given)
        out, count = launched(lambda given=given: gated_delta_rule(*given)[0])
        assert count == forward + per_step * steps
        _, count = launched(lambda out=out: out.backward(out.detach()))
        assert count == backward + per_step_back * steps
