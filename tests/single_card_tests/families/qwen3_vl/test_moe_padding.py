"""Padding in a Qwen3-VL with experts, and recomputation of its layers.

Guarantees: padding, on either side and of any amount, is routed to no expert, is in no count, and
changes neither outputs nor gradients of real tokens, in training and in generation; leaving it out
reads nothing on the host if the collator lists the real rows. A recomputed layer keeps its choice
of experts.
"""

from contextlib import contextmanager

import numpy as np
import paddle
import pytest

from paddle_vl.batch.visual_index import host_visual_indices
from paddle_vl.families.vlm.training.objective import empty_batch
from paddle_vl.nn import experts
from paddle_vl.nn.dispatch import use_kernels
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.testing import forbid_host_reads, record_host_reads
from paddle_vl.testing.qwen3_vl import EXPERTS, IMAGE, VIDEO
from tests.single_card_tests.families.qwen3_vl.test_moe import alone, batch
from tests.support.tiny import tiny_model


def padded(side: str, length: int, pad: int = 0) -> dict:
    """`batch` with rows of this length, padded on one side."""
    inputs, keys = batch(), ("input_ids", "attention_mask", "labels")
    # On the left, padding would predict it.
    inputs["labels"][:, 0] = -100
    for key, fill in zip(keys, (pad, 0, -100), strict=True):
        rows = [row[:end] for row, end in zip(inputs[key], (9, 4), strict=True)]
        widths = [(length - len(row), 0)[:: 1 if side == "left" else -1] for row in rows]
        inputs[key] = np.stack(
            [
                np.pad(row, width, constant_values=fill)
                for row, width in zip(rows, widths, strict=True)
            ]
        )
    return inputs


@contextmanager
def products_seen():
    """Numbers of rows that the experts multiply, one per product."""
    seen, plain = [], experts.grouped_linear

    def product(x_NI, *arguments):
        seen.append(x_NI.shape[0])
        return plain(x_NI, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "grouped_linear", product)
        yield seen


def collated(inputs: dict) -> dict:
    """What the collator adds, on the device."""
    model = tiny_model(**EXPERTS)
    keys = ("input_ids", "attention_mask", "image_grid_thw")
    positions, _ = model.position_ids(*(inputs[key] for key in keys))
    rows = {"real_row_indices": np.flatnonzero(inputs["attention_mask"])}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    visual = host_visual_indices(inputs["input_ids"], num_image_rows=4, **ids)
    arrays = inputs | rows | visual | {"position_ids": positions}
    on_device = {key: paddle.to_tensor(array) for key, array in arrays.items()}
    return on_device | {"image_grid_thw": inputs["image_grid_thw"], "num_target_tokens": 7}


@pytest.mark.parametrize("form", ["arrays", "tensors", "collated"])
@pytest.mark.parametrize(("side", "length"), [("left", 12), ("right", 9), ("right", 32)])
def test_padding_takes_no_experts_time_and_is_in_no_count(side, length, form):
    model, inputs = tiny_model(**EXPERTS), padded(side, length)
    given = inputs if form == "arrays" else collated(inputs)
    if form == "tensors":
        given = {key: given[key] for key in inputs}
    with products_seen() as seen:
        loss = model(**given, output_router_logits=True).loss
        loss.backward()
    # Thirteen real tokens, two experts of each, two products in two layers.
    assert seen == [26] * 4
    assert [int(count.sum()) for count in model.tokens_per_expert().values()] == [26, 26]
    assert np.isfinite(loss.item())


@pytest.mark.parametrize("kernels", ["cpu", "plain", "gpu"])
@pytest.mark.parametrize(("side", "length"), [("left", 12), ("right", 32)])
def test_real_tokens_have_the_values_and_gradients_of_samples_without_padding(
    side, length, kernels
):
    settings = EXPERTS | {"output_router_logits": True}
    model, inputs = tiny_model(**settings), padded(side, length)
    with use_kernels(kernels):
        output = model(**inputs)
        (output.loss_sum / 5).backward()
        found = {key: p.grad.numpy() for key, p in model.hf_named_parameters()}
        real = inputs["attention_mask"].astype(bool)
        logits = output.logits.numpy()
        assert np.isfinite(logits).all()
        model.clear_gradients()
        for i, sample in enumerate(alone(inputs)):
            single = model(**sample)
            (single.loss_sum / 5).backward()
            np.testing.assert_allclose(logits[i, real[i]], single.logits.numpy()[0], atol=2e-5)
    for key, parameter in model.hf_named_parameters():
        wanted = parameter.grad.numpy()
        scale = max(np.abs(wanted).max(), 1e-6)
        np.testing.assert_allclose(found[key], wanted, atol=2e-5 * scale, err_msg=key)


@pytest.mark.parametrize("side", ["left", "right"])
def test_real_tokens_do_not_see_what_padding_holds(side):
    model, first, second = tiny_model(**EXPERTS), padded(side, 12), padded(side, 12, pad=33)
    real = first["attention_mask"].astype(bool)
    found = [model(**inputs).logits.numpy() for inputs in (first, second)]
    assert np.abs(found[0] - found[1])[~real].max() > 1e-3
    np.testing.assert_array_equal(found[0][real], found[1][real])


def test_a_batch_of_padding_has_no_count_no_loss_and_no_gradient():
    model = tiny_model(**EXPERTS, output_router_logits=True, router_aux_loss_coef=1.0)
    output = model(**empty_batch(3))
    output.loss.backward()
    assert np.isfinite(output.logits.numpy()).all()
    assert [output.loss.item(), output.aux_loss.item()] == [0, 0]
    assert [int(count.sum()) for count in model.tokens_per_expert().values()] == [0, 0]
    for layer in (model.decoder_layers[0], model.decoder_layers[2]):
        for parameter in layer.mlp.parameters():
            assert not parameter.grad.numpy().any()


def test_a_batch_of_the_collator_needs_no_host_read():
    model = tiny_model(**EXPERTS, output_router_logits=True)
    given = collated(padded("left", 12))
    with forbid_host_reads(), use_kernels("gpu"):
        model(**given).loss.backward()
    del given["real_row_indices"]
    with record_host_reads() as reads, use_kernels("gpu"):
        model(**given).loss.backward()
    assert [place.partition(":")[0] for place in reads] == ["nn/transfer.py"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_recomputed_layer_takes_the_plan_of_its_first_pass(side, monkeypatch):
    sorted_rows, sort = [], experts.sort_by_expert

    def counting(indices_RK, num_experts):
        sorted_rows.append(indices_RK.shape[0])
        return sort(indices_RK, num_experts)

    monkeypatch.setattr(experts, "sort_by_expert", counting)
    inputs, found = padded(side, 12), []
    for recomputed in (False, True):
        model = tiny_model(**EXPERTS)
        if recomputed:
            recompute_layers(model.decoder_layers)
        sorted_rows.clear()
        loss = model(**inputs).loss
        loss.backward()
        assert sorted_rows == [13, 13]
        found.append({key: p.grad.numpy() for key, p in model.hf_named_parameters()})
    for key, grad in found[0].items():
        np.testing.assert_allclose(found[1][key], grad, atol=1e-6, err_msg=key)


def test_a_recomputed_layer_keeps_its_experts_if_the_router_would_now_choose_others():
    model = tiny_model(**EXPERTS)
    recompute_layers(model.decoder_layers)
    loss = model(**padded("right", 12)).loss
    counts = {i: count.numpy() for i, count in model.tokens_per_expert().items()}
    for i in counts:
        gate = model.decoder_layers[i].mlp.gate.weight
        gate.set_value(-gate)
    with products_seen() as seen:
        loss.backward()
    assert seen == [26] * 4
    for i, count in counts.items():
        assert (model.tokens_per_expert()[i].numpy() == count).all()
        # An expert without rows has no gradient, one with rows has.
        grads = model.decoder_layers[i].mlp.experts.down_proj.grad.numpy()
        assert (np.abs(grads).max(axis=(1, 2)) > 0).tolist() == (count > 0).tolist()


def test_padded_prompts_are_not_routed_in_generation():
    model, inputs = tiny_model(**EXPERTS), padded("left", 12)
    prompts = [{k: v for k, v in one.items() if k != "labels"} for one in [inputs, *alone(inputs)]]
    with products_seen() as seen:
        together, *single = (
            model.generate(**prompt, max_new_tokens=4, eos_token_id=63) for prompt in prompts
        )
    # The prompts, then a token of each in every step.
    assert seen[:16] == [26] * 4 + [4] * 12
    np.testing.assert_array_equal(together, np.concatenate(single))


def test_the_balance_of_a_padded_batch_needs_the_values_of_its_mask():
    """A traced program has none."""
    model, inputs = tiny_model(**EXPERTS), batch()
    inputs |= {"attention_mask": object(), "has_left_padding": False}
    inputs["position_ids"] = np.zeros([3, *inputs["input_ids"].shape], np.int64)
    with pytest.raises(ValueError, match="needs the values of attention_mask"):
        model(**inputs, output_router_logits=True)
