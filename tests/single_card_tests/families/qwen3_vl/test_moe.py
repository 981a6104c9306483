"""Qwen3-VL with experts.

Guarantees: which layers have experts; both configuration dialects are read, the hub's is written,
others are refused; experts are read in either orientation, also square ones, and written in the
hub's; routing weights and their sum; the auxiliary loss equals its formula: padding left out,
layers pooled, enabled by configuration or call; recomputation and micro-batches change nothing.
Equality with HF is in test_golden.py.
"""

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.families.vlm.modeling.moe import Router, SparseMoE
from paddle_vl.families.vlm.training.pipeline import layer_costs
from paddle_vl.nn.linear import Linear
from paddle_vl.testing.qwen3_vl import EXPERTS, IMAGE, patches, token_rows
from tests.support.tiny import GOLDEN, tiny_config, tiny_model

MODEL = GOLDEN / "qwen_vl" / "models" / "moe"


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"num_experts_per_tok": 7}, "num_experts_per_tok is 7; it must be at most"),
     ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
     ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
     ({"mlp_only_layers": [1, 3]}, r"mlp_only_layers \[3\] lie outside the decoder's 3 layers"),
     ({"num_local_experts": 4}, "num_experts is 6 but num_local_experts 4"),
     ({"num_shared_experts": 1}, r"does not know the keys \['num_shared_experts'\]")],
)  # fmt: skip
def test_a_wrong_configuration_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**EXPERTS | settings)


def test_a_dense_model_knows_no_experts():
    values = tiny_config().to_dict()
    values["text_config"]["num_experts"] = 4
    with pytest.raises(ValueError, match="does not know the keys .'num_experts'"):
        Qwen3VLConfig.from_dict(values)
    with pytest.raises(ValueError, match="output_router_logits is true but this model has no expe"):
        tiny_model()(**batch(), output_router_logits=True)


# Width 16: no matrix is square, then gate and up are, then down is.
@pytest.mark.parametrize("inner", [6, 8, 16])
def test_experts_load_from_either_layout_and_are_written_in_the_hubs(inner, tmp_path):
    model = tiny_model(**EXPERTS | {"moe_intermediate_size": inner})
    model.save_pretrained(tmp_path)
    file, wanted = tmp_path / "model.safetensors", model.hf_state_dict()
    stored = load_file(file)
    keys = [key for key in stored if ".experts." in key]
    assert [stored[key].shape for key in sorted(keys)[:2]] == [(6, inner, 16), (6, 16, 2 * inner)]
    for turned in (False, True):
        if turned:
            save_file(
                {
                    key: np.ascontiguousarray(array.swapaxes(1, 2)) if key in keys else array
                    for key, array in stored.items()
                },
                file,
            )
        found = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path).hf_state_dict()
        for key, array in wanted.items():
            np.testing.assert_array_equal(found[key], array, err_msg=key)


def test_experts_of_neither_shape_are_named(tmp_path):
    tiny_model(**EXPERTS).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    arrays = load_file(file)
    key = "model.language_model.layers.2.mlp.experts.down_proj"
    save_file(arrays | {key: arrays[key][:, :5]}, file)
    with pytest.raises(ValueError, match=r"1 misshapen: .*down_proj \(file \[6, 5, 16\], model"):
        Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)


def test_routing_takes_the_largest_and_makes_their_weights_sum_to_one():
    linear = Linear(3, 4, bias=False)
    linear.weight.set_value(np.eye(3, 4, dtype=np.float32))
    routing = Router(linear, 2)(paddle.to_tensor([[0.0, 2.0, 1.0], [5.0, 0.0, -1.0]]))
    exponents = np.exp([[2.0, 1.0], [5.0, 0.0]])
    # The last expert has logit 0 too; of equal experts either may be chosen.
    assert routing.indices[0].tolist() == [1, 2]
    assert routing.indices[1].tolist() in ([0, 1], [0, 3])
    np.testing.assert_allclose(
        routing.weights.numpy(), exponents / exponents.sum(axis=1, keepdims=True), rtol=1e-6
    )


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


def test_the_mask_counts_although_nothing_is_padded_on_the_left():
    model, inputs = tiny_model(**EXPERTS), batch(length=12)
    wanted = model(**inputs, output_router_logits=True).aux_loss.item()
    hinted = model(**inputs, has_left_padding=False, output_router_logits=True).aux_loss.item()
    assert hinted == pytest.approx(wanted, rel=1e-6)


def test_the_configuration_asks_for_the_auxiliary_loss_and_a_call_overrides_it():
    model = tiny_model(**EXPERTS, output_router_logits=True)
    assert model(**batch()).aux_loss is not None
    assert model(**batch(), output_router_logits=False).aux_loss is None


def test_the_last_calls_tokens_per_expert_are_known_by_layer():
    model, inputs = tiny_model(**EXPERTS), batch()
    assert model.tokens_per_expert() == {}
    model(**inputs)
    counts = model.tokens_per_expert()
    assert list(counts) == [0, 2]
    assert [int(count.sum()) for count in counts.values()] == [
        2 * inputs["attention_mask"].sum()
    ] * 2
    assert tiny_model().tokens_per_expert() == {}


def test_costs_count_the_experts_a_token_sees():
    layers, *_ = layer_costs(tiny_config(**EXPERTS))
    attention = 2 * 16 * 6 * 8
    dense, sparse = attention + 3 * 16 * 24, attention + 16 * (3 * 2 * 8 + 6)
    assert layers == [sparse, dense, sparse]


def test_generation_works_with_a_configuration_that_asks_for_the_auxiliary_loss():
    prompt = {"input_ids": token_rows([1, 9, 2, 5]), "max_new_tokens": 3, "eos_token_id": 63}
    answers = tiny_model(**EXPERTS, output_router_logits=True).generate(**prompt)
    np.testing.assert_array_equal(answers, tiny_model(**EXPERTS).generate(**prompt))
