"""Qwen3-VL with experts: the auxiliary loss by its formula; padding is routed to no expert and
changes nothing; a recomputed layer keeps its choice. Equality with HF is in vlm/test_golden.py."""

from contextlib import contextmanager

import numpy as np
import paddle
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.batch.visual_index import host_visual_indices
from paddle_vl.families.vlm.modeling.moe import SparseMoE
from paddle_vl.families.vlm.training.objective import empty_batch
from paddle_vl.nn import experts
from paddle_vl.nn.dispatch import use_kernels
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.testing import forbid_host_reads, record_host_reads
from paddle_vl.testing.qwen3_vl import EXPERTS, IMAGE, VIDEO, patches, token_rows
from tests.support.tiny import tiny_config, tiny_model


def batch(length: int | None = None) -> dict:
    pixels, grid = patches([[1, 4, 4]])
    ids = token_rows([1, 9, ("image", 4), 2, 5, 7], [4, 3, 8, 6], length=length)
    return {
        "input_ids": ids, "attention_mask": (ids != 0).astype(np.int64),
        "labels": np.where((ids != IMAGE) & (ids != 0), ids, -100),
        "pixel_values": pixels, "image_grid_thw": grid,
    }  # fmt: skip


def alone(inputs: dict) -> list[dict]:
    """The two samples of a padded `batch`, the first with the image, without padding."""
    samples = []
    for i in range(2):
        real = inputs["attention_mask"][i].astype(bool)
        keys = ("input_ids", "attention_mask", "labels")
        samples.append({key: inputs[key][i : i + 1, real] for key in keys})
    return [
        samples[0] | {key: inputs[key] for key in ("pixel_values", "image_grid_thw")},
        samples[1],
    ]


@pytest.mark.parametrize(
    ("settings", "with_experts"),
    [({}, [0, 1, 2, 3, 4]), ({"mlp_only_layers": [1, 4]}, [0, 2, 3]),
     ({"decoder_sparse_step": 2}, [1, 3]),
     ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [3])],
)  # fmt: skip
def test_layers_are_dense_by_list_and_by_step(settings, with_experts):
    config = tiny_config(**EXPERTS | {"mlp_only_layers": []} | settings, num_hidden_layers=5)
    model = Qwen3VLForConditionalGeneration.from_config(config)
    found = [i for i, layer in enumerate(model.decoder_layers) if isinstance(layer.mlp, SparseMoE)]
    assert found == with_experts


def test_a_dense_model_has_no_balance():
    with pytest.raises(ValueError, match="output_router_logits is true but this model has no expe"):
        tiny_model()(**batch(), output_router_logits=True)


def auxiliary_loss(model, inputs: dict) -> float:
    """`E * sum f P` from the routers' outputs for each sample without padding, with NumPy."""
    routings = []
    hooks = [
        layer.mlp.gate.register_forward_post_hook(lambda *call: routings.append(call[-1]))
        for layer in model.decoder_layers
        if layer.has_experts
    ]
    for sample in alone(inputs):
        model(**sample)
    for hook in hooks:
        hook.remove()
    chosen = np.concatenate([routing.indices.numpy() for routing in routings])
    probabilities = np.concatenate([routing.probabilities.numpy() for routing in routings])
    num_experts = probabilities.shape[1]
    share = np.bincount(chosen.reshape(-1), minlength=num_experts) / len(chosen)
    return num_experts * float((share * probabilities.mean(axis=0)).sum())


def test_auxiliary_loss_pools_layers_and_leaves_padding_out():
    model, inputs = tiny_model(**EXPERTS), batch(length=12)
    output = model(**inputs, output_router_logits=True)
    wanted = auxiliary_loss(model, inputs)
    assert output.aux_loss.item() == pytest.approx(wanted, rel=1e-5)
    everything = inputs | {"attention_mask": np.ones_like(inputs["attention_mask"])}
    with_padding = model(**everything, output_router_logits=True).aux_loss.item()
    assert abs(with_padding - wanted) > 1e-3
    plain = model(**inputs)
    assert plain.aux_loss is None
    assert output.loss_sum.item() == plain.loss_sum.item()
    weight = model.config.text_config.router_aux_loss_coef
    assert output.loss.item() == pytest.approx(plain.loss.item() + weight * wanted, rel=1e-6)


def test_the_configuration_asks_for_the_auxiliary_loss_and_a_call_overrides_it():
    model = tiny_model(**EXPERTS, output_router_logits=True)
    assert model(**batch()).aux_loss is not None
    assert model(**batch(), output_router_logits=False).aux_loss is None


def test_generation_works_with_a_configuration_that_asks_for_the_auxiliary_loss():
    prompt = {"input_ids": token_rows([1, 9, 2, 5]), "max_new_tokens": 3, "eos_token_id": 63}
    answers = tiny_model(**EXPERTS, output_router_logits=True).generate(**prompt)
    np.testing.assert_array_equal(answers, tiny_model(**EXPERTS).generate(**prompt))


def padded(side: str, length: int) -> dict:
    """`batch` with rows of this length, padded on one side."""
    inputs, keys = batch(), ("input_ids", "attention_mask", "labels")
    # On the left, padding would predict it.
    inputs["labels"][:, 0] = -100
    for key, fill in zip(keys, (0, 0, -100), strict=True):
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
    with rows_seen("grouped_linear", lambda x_NI, *_: x_NI.shape[0]) as seen:
        yield seen


@contextmanager
def rows_seen(name: str, count):
    """What `count` makes of each call of a function of `paddle_vl.nn.experts`."""
    seen, function = [], getattr(experts, name)

    def call(*arguments):
        seen.append(count(*arguments))
        return function(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, name, call)
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
    with rows_seen("routed_experts", lambda _, indices_RK, *__: indices_RK.size) as seen:
        together, *single = (
            model.generate(**prompt, max_new_tokens=4, eos_token_id=63) for prompt in prompts
        )
    # The prompts, then a token of each in every step.
    assert seen[:8] == [26] * 2 + [4] * 6
    np.testing.assert_array_equal(together, np.concatenate(single))
