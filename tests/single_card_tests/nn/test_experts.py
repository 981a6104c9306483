"""Experts over token rows, against a loop over experts; repeated runs are bit-identical."""

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_vl.nn.dispatch import use_kernels
from paddle_vl.nn.experts import (
    Experts,
    GroupSizes,
    RoutedRows,
    grouped_linear,
)
from paddle_vl.testing import forbid_host_reads

KERNELS = ["cpu", "plain", "gpu"]
NUM_EXPERTS, WIDTH, INNER, TOKENS = 5, 6, 4, 7
CHOICES = {
    "mixed": [[0, 3], [3, 1], [1, 0], [3, 4], [4, 3], [0, 1], [3, 0]],
    "one expert has every token": [[2, e] for e in (0, 1, 3, 4, 0, 1, 3)],
    "some have none": [[4, 2]] * TOKENS,
}


def inputs(seed: int = 0) -> tuple:
    rng = np.random.default_rng(seed)
    x_TD = paddle.to_tensor(rng.normal(size=(TOKENS, WIDTH)).astype(np.float32))
    weights_TK = paddle.to_tensor(rng.uniform(0.1, 1, size=(TOKENS, 2)).astype(np.float32))
    x_TD.stop_gradient = weights_TK.stop_gradient = False
    return x_TD, weights_TK


def layer() -> Experts:
    paddle.seed(0)
    return Experts(NUM_EXPERTS, WIDTH, INNER, init_std=0.5)


def loop_over_experts(layer: Experts, x_TD, indices: list, weights_TK):
    rows = []
    for t, chosen in enumerate(indices):
        row = paddle.zeros([WIDTH])
        for k, e in enumerate(chosen):
            gate, up = paddle.matmul(x_TD[t], layer.gate_up_proj[e]).chunk(2)
            row += weights_TK[t, k] * paddle.matmul(F.silu(gate) * up, layer.down_proj[e])
        rows.append(row)
    return paddle.stack(rows)


def output_and_gradients(run, frozen: str = "") -> list[np.ndarray | None]:
    module, (x_TD, weights_TK) = layer(), inputs()
    leaves = {
        "x": x_TD, "weights": weights_TK,
        "gate_up_proj": module.gate_up_proj, "down_proj": module.down_proj,
    }  # fmt: skip
    if frozen:
        leaves[frozen].stop_gradient = True
    out_TD = run(module, x_TD, weights_TK)
    (out_TD * paddle.linspace(-1, 1, TOKENS * WIDTH).reshape([TOKENS, WIDTH])).sum().backward()
    gradients = [leaf.grad for leaf in leaves.values()]
    return [out_TD.numpy(), *(None if g is None else g.numpy() for g in gradients)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("indices", CHOICES.values(), ids=CHOICES)
def test_output_and_gradients_equal_a_loop_over_experts(indices, kernels):
    chosen = paddle.to_tensor(indices)
    with use_kernels(kernels):
        found, again = (output_and_gradients(lambda m, x, w: m(x, chosen, w)) for _ in range(2))
    wanted = output_and_gradients(lambda m, x, weights: loop_over_experts(m, x, indices, weights))
    for one, other, repeated in zip(found, wanted, again, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
        np.testing.assert_array_equal(one, repeated)


@pytest.mark.parametrize("counts", [[2, 0, 5, 0, 1], [0, 0, 0, 0, 8], [1, 0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("behind", [0, 2])
def test_products_agree_whatever_the_counts(counts, behind):
    """And whether rows of zeros without an expert are behind those counted."""
    paddle.seed(1)
    weight, found = paddle.randn([5, 3, 4]), []
    for kernels in KERNELS:
        x_NI = paddle.linspace(0, 1, 3 * sum(counts)).reshape([-1, 3])
        x_NI = paddle.concat([x_NI, paddle.zeros([behind, 3])]) if behind else x_NI
        matrix = weight.clone()
        x_NI.stop_gradient = matrix.stop_gradient = False
        with use_kernels(kernels):
            sizes = GroupSizes(paddle.to_tensor(counts), may_read=not behind)
            y_NO = grouped_linear(x_NI, matrix, sizes)
            (y_NO * y_NO).sum().backward()
        found.append([y_NO.numpy(), x_NI.grad.numpy(), matrix.grad.numpy()])
        assert not y_NO.numpy()[sum(counts) :].any()
    for first, *others in zip(*found, strict=True):
        for other in others:
            np.testing.assert_allclose(first, other, atol=1e-6)


@pytest.mark.parametrize("kernels", ["plain", "gpu"])
def test_plain_experts_and_the_gpu_kernel_of_few_rows_read_nothing_on_the_host(kernels):
    module, (x_TD, weights_TK) = layer(), inputs()
    indices_TK = paddle.to_tensor(CHOICES["mixed"])
    with forbid_host_reads(), use_kernels(kernels):
        module(x_TD, indices_TK, weights_TK).sum().backward()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("frozen", "place"), [("x", 1), ("weights", 2), ("gate_up_proj", 3), ("down_proj", 4)]
)
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen, place, kernels):
    chosen = paddle.to_tensor(CHOICES["mixed"])
    with use_kernels(kernels):
        wanted, found = (
            output_and_gradients(lambda m, x, w: m(x, chosen, w), each) for each in ("", frozen)
        )
    assert found[place] is None
    wanted[place] = None
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("real", [[0, 2, 5], [1], list(range(TOKENS))], ids=str)
def test_rows_that_are_not_routed_get_zeros_and_pass_no_gradient(real, kernels):
    module, (x_TD, weights_TK) = layer(), inputs()
    rows = RoutedRows(TOKENS, paddle.to_tensor(real))
    chosen = paddle.to_tensor(CHOICES["mixed"])[real]
    with use_kernels(kernels):
        out_TD = module(rows.taken(x_TD), chosen, weights_TK[real], rows)
        (out_TD * out_TD).sum().backward()
    whole, x_grad = out_TD.numpy(), x_TD.grad.numpy()
    alone, (x_TD, weights_TK) = layer(), inputs()
    with use_kernels(kernels):
        out_RD = alone(x_TD[real], chosen, weights_TK[real])
        (out_RD * out_RD).sum().backward()
    np.testing.assert_array_equal(whole[real], out_RD.numpy())
    np.testing.assert_array_equal(x_grad, x_TD.grad.numpy())
    others = np.setdiff1d(np.arange(TOKENS), real)
    assert not whole[others].any()
    assert not x_grad[others].any()
    for found, wanted in zip(module.parameters(), alone.parameters(), strict=True):
        np.testing.assert_array_equal(found.grad.numpy(), wanted.grad.numpy())
    assert module.tokens_per_expert.tolist() == alone.tokens_per_expert.tolist()


@pytest.mark.parametrize("kernels", KERNELS)
def test_without_a_row_to_route_output_gradients_and_counts_are_zero(kernels):
    module, (x_TD, weights_TK) = layer(), inputs()
    rows = RoutedRows(TOKENS, paddle.zeros([0], dtype="int64"))
    chosen = paddle.to_tensor(CHOICES["mixed"])[:1]
    with use_kernels(kernels):
        out_TD = module(rows.taken(x_TD), chosen, weights_TK[:1], rows)
        (out_TD + 1).square().sum().backward()
    assert out_TD.shape == [TOKENS, WIDTH]
    assert module.tokens_per_expert.tolist() == [0] * NUM_EXPERTS
    for tensor in (out_TD, x_TD.grad, *(parameter.grad for parameter in module.parameters())):
        assert not tensor.numpy().any()
