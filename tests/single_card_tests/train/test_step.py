"""One training step, and evaluation.

The golden cases compare this step with HF's trajectory on torch.
"""

from math import ceil
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_vl.families.vlm.evaluation.scorer import Answer, exact_report
from paddle_vl.families.vlm.inputs.collate import prepared
from paddle_vl.families.vlm.training.objective import VLBatchAdapter, VLLoss
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.train.evaluate import mean_losses
from paddle_vl.train.freeze import freeze_parameters, trained_names
from paddle_vl.train.step import (
    ModelRunner,
    agree_on_step,
    leave_step,
    train_step,
)
from tests.single_card_tests.train.batches import (
    assert_same_bits,
    count_calls,
    image_batch,
    optimizer_of,
    split_batch,
    vl_runner,
)
from tests.support.tiny import tiny_model

TEXTS, PROMPTS = [[1, 2, 3, 4, 5, 9, 9], [6, 7, 8], [3, 3, 3, 3]], [2, 1, 3]


def gradients(model, batches):
    total = sum(batch["num_target_tokens"] for batch in batches)
    loss = vl_runner(model).accumulate_gradients(batches, [total]).item()
    return loss, {name: p.grad.numpy() for name, p in model.hf_named_parameters()}


def test_accumulation_equals_one_large_batch():
    """With micro-batches of 5, 2 and 1 targets, the mean of means would be another loss."""
    whole_loss, whole = gradients(tiny_model(), [image_batch(TEXTS, PROMPTS)])
    parts = split_batch(TEXTS, PROMPTS)
    assert [part["num_target_tokens"] for part in parts] == [5, 2, 1]
    loss, grads = gradients(tiny_model(), parts)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    for name, grad in whole.items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-3, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("flat", [False, True], ids=["per tensor", "flat"])
def test_nonfinite_step_changes_nothing(flat):
    model = tiny_model()
    optimizer = optimizer_of(model, flat=flat, weight_decay=0.1)
    good, bad = image_batch(TEXTS, PROMPTS), image_batch(TEXTS, PROMPTS)
    bad.pixel_values[3, 5] = np.inf
    train_step(vl_runner(model), optimizer, [good], 0.01)
    weights = model.hf_state_dict()
    state = {name: tensor.numpy().copy() for name, tensor in optimizer.state_tensors().items()}
    result = train_step(vl_runner(model), optimizer, [good, bad], 0.01)
    assert not bool(result.is_good)
    assert_same_bits(model.hf_state_dict(), weights)
    assert_same_bits({n: t.numpy() for n, t in optimizer.state_tensors().items()}, state)
    assert all(parameter.grad is None for parameter in model.parameters())
    train_step(vl_runner(model), optimizer, [good], 0.01)
    assert (model.hf_state_dict()["lm_head.weight"] != weights["lm_head.weight"]).any()


def test_step_without_targets_is_refused():
    model = tiny_model()
    batch = image_batch([[1, 2]], [2])
    with pytest.raises(ValueError, match="have no target token"):
        train_step(vl_runner(model), optimizer_of(model), [batch, batch], 0.01)


def test_a_step_that_reaches_nothing_trained_updates_nothing(caplog):
    model = tiny_model()
    decoder = ["model.language_model.*", "lm_head.*"]
    optimizer = optimizer_of(model, decoder, weight_decay=0.1, weight_decay_exclude=[])
    before = model.hf_state_dict()
    text = {"input_ids": [[1, 2, 3]], "labels": [[-100, 2, 3]], "position_ids": [[[0, 1, 2]]] * 3}
    text |= {"attention_mask": [[1, 1, 1]], "real_row_indices": [0, 1, 2]}
    batch = {name: np.array(value) for name, value in text.items()}
    batch = prepared(batch | {"num_target_tokens": 2, "has_left_padding": False})
    results = [train_step(vl_runner(model), optimizer, [batch], 0.1) for _ in range(2)]
    assert [result.grad_norm.item() for result in results] == [0.0, 0.0]
    for name, array in model.hf_state_dict().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert caplog.text.count("no trained parameter got a gradient") == 1


def test_a_step_whose_gradients_are_zero_decays_the_weights():
    """The loss depends on the decoder, though a head of zeros passes it nothing."""
    model = tiny_model()
    paddle.assign(paddle.zeros_like(model.lm_head.weight), model.lm_head.weight)
    frozen = ["model.visual.*", "lm_head.*"]
    optimizer = optimizer_of(model, frozen, weight_decay=0.1, weight_decay_exclude=[])
    name, weight = "embedding", model.language_model.embedding.embed_tokens.weight
    before = weight.numpy()
    batch = image_batch(TEXTS, PROMPTS)
    result = train_step(vl_runner(model), optimizer, [batch], 0.1)
    assert result.grad_norm.item() == 0.0
    np.testing.assert_allclose(weight.numpy(), before * 0.99, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("frozen", ["none", "patch embedding", "tower", "all below the last layer"])
def test_recomputation_changes_no_gradient(frozen):
    """With a frozen patch embedding the first block's input needs no gradient, but its weights
    do."""
    patterns = {
        "none": [],
        "patch embedding": ["model.visual.patch_embed.*", "model.visual.pos_embed.*"],
        "tower": ["model.visual.*"],
        "all below the last layer": ["model.visual.*", "*.embed_tokens.*", "*.layers.[01].*"],
    }[frozen]
    results = []
    for recomputed in (False, True):
        model = tiny_model()
        named = list(model.hf_named_parameters())
        trained = freeze_parameters(named, trained_names(dict(named), patterns))
        if recomputed:
            recompute_layers([*model.vision_blocks, *model.decoder_layers])
        calls = count_calls(model.decoder_layers[2].mlp)
        vl_runner(model).accumulate_gradients([image_batch(TEXTS, PROMPTS)], [8])
        assert len(calls) == (2 if recomputed else 1)
        model.eval()
        with paddle.no_grad():
            model(**image_batch(TEXTS, PROMPTS))
        assert len(calls) == (3 if recomputed else 2)
        results.append({name: parameter.grad for name, parameter in trained})
    # Not bit-identical: if a layer's output is used twice, sums are taken in another order.
    plain, again = results
    for name, grad in plain.items():
        assert grad is not None, name
        np.testing.assert_allclose(
            again[name].numpy(), grad.numpy(), atol=1e-6 * float(grad.abs().max()), err_msg=name
        )


class OfTwo(SingleRank):
    """One of two ranks that send the same, or nothing but zeros."""

    def __init__(self):
        self.sent: list[list[int]] = []

    def agree(self, counts, signal=None, largest=()):
        self.sent.append([*counts, *largest])
        return [*(2 * count for count in counts), *largest], signal


@pytest.mark.parametrize("has_sources", [True, False])
def test_ranks_exchange_the_counts_of_sources(has_sources):
    first, second = split_batch(TEXTS[:2], PROMPTS[:2])
    if has_sources:
        first |= {"source_tokens": (7, 0), "source_documents": (1, 0)}
        second |= {"source_tokens": (4, 5), "source_documents": (0, 2)}
    ranks = OfTwo()
    totals = agree_on_step([first, second], VLLoss(), ranks)
    assert totals.source_tokens == ((22, 10) if has_sources else ())
    assert totals.source_documents == ((2, 4) if has_sources else ())
    assert totals.needed == ((2,), (2,))
    assert totals.num_tokens == 2 * (13 + 9)
    leave_step(totals.num_agreed, ranks, 15)
    assert len(ranks.sent[0]) == len(ranks.sent[1])
    assert not any("source_tokens" in each for each in [first, second])


class Overflowing(ModelRunner):
    """Weighs each pass by a random number; with a capacity, its experts overflow at the second
    micro-batch."""

    def accumulate_gradients(self, batches: Any, totals, store=None, num_sources=0):
        capacities = [batch.expert_capacity for batch in batches]
        batches = [batch | {"expert_capacity": None} for batch in batches]
        if capacities[0] is not None:
            self.rooms = [capacity.num_rows for capacity in capacities]
            capacities[1].overflows.append(paddle.to_tensor([3, 9]).max() > 8)
            # Rows that are left out.
            batches = batches[:1]
        terms = super().accumulate_gradients(batches, totals, store, num_sources)
        weight = paddle.rand([])
        for parameter in self.model.parameters():
            parameter.grad = parameter.grad * weight
        return terms * weight


def test_a_step_that_overflows_is_repeated_and_equals_one_with_exact_sizes():
    found = []
    for factor in (None, 1.5):
        model = tiny_model()
        optimizer, runner = optimizer_of(model), Overflowing(model, VLLoss(), VLBatchAdapter())
        batches = split_batch(TEXTS[:2], PROMPTS[:2])
        if factor is not None:
            batches = [b | {"expert_rows": ceil(factor * b.num_tokens)} for b in batches]
        result = train_step(runner, optimizer, batches, 0.01, seed=lambda: paddle.seed(3))
        assert result.is_repeated == (factor is not None)
        values = [*model.parameters(), *optimizer.state_tensors().values(), result.terms]
        found.append([value.numpy() for value in [*values, result.grad_norm]])
    # Of 13 and 9 tokens.
    assert runner.rooms == [20, 14]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("training", [True, False])
def test_loss_is_one_mean_over_all_targets(training):
    model = tiny_model()
    expected = float(model(**image_batch(TEXTS, PROMPTS)).loss)
    model.train() if training else model.eval()
    losses = mean_losses(vl_runner(model), split_batch(TEXTS, PROMPTS))
    assert losses.loss == pytest.approx(expected, rel=1e-6)
    assert losses.counts == {"loss": 8}
    assert model.training is training


def test_data_without_targets_is_refused():
    with pytest.raises(ValueError, match="no target token"):
        mean_losses(vl_runner(tiny_model()), [image_batch([[1, 2]], [2])])


def answer(task: str, is_exact: bool) -> Answer:
    return Answer("f:1", task, "p", "a", "a" if is_exact else "b", is_exact)


def test_report_counts_exact_answers_per_task():
    answers = [answer("name", True), answer("add", False), answer("name", False)]
    assert exact_report(answers).splitlines() == [
        "exact answers:",
        "  add            0.00%  (0 of 1)",
        "  name          50.00%  (1 of 2)",
        "  all answers   33.33%  (1 of 3)",
    ]
