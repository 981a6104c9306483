"""Fused and separate projections: query, key and value; gate and up.

Guarantees: fresh fused weights equal those that each linear would draw; separating changes no
output, gradient or file, whether the model is materialized or not; where a setting concerns one
linear alone, a run separates that layer and trains as with unfused linears; a linear that cannot be
separated is refused.
"""

import numpy as np
import paddle
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.config.load import load_run_config
from paddle_vl.config.schema import LoRAConfig, TrainConfig
from paddle_vl.nn.linear import Columns, FusedLinear, Linear, SeparateLinears, fused_columns
from paddle_vl.testing.qwen3_vl import token_rows
from paddle_vl.train.build import build_trainer
from paddle_vl.train.freeze import freeze_parameters, treated_apart
from paddle_vl.train.optimizer import Optimizer
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.tiny import tiny_config, tiny_model

QUERIES = "model.language_model.layers.1.self_attn.q_proj.weight"


def fused_weights(model) -> list[paddle.Tensor]:
    return [parameter for parameter in model.parameters() if fused_columns(parameter)]


def gradients(model) -> dict[str, np.ndarray]:
    ids = token_rows([1, 2, 3, 4, 5], [6, 7, 8, 9, 1])
    model(input_ids=ids, labels=ids).loss.backward()
    return {
        item.key: item.of_own(item.parameter.grad.numpy())
        for item in model.stored_parameters()
        if item.parameter.grad is not None
    }


def test_each_linear_draws_what_it_would_draw_by_itself():
    paddle.seed(1)
    layer = FusedLinear(6, [Columns("a", 4), Columns("b", 3)])
    paddle.seed(1)
    alone = [Linear(6, width, False).weight.numpy() for width in (4, 3)]
    np.testing.assert_array_equal(layer.weight.numpy(), np.concatenate(alone, axis=1))


def test_separating_changes_neither_outputs_nor_gradients_nor_values():
    fused, apart = tiny_model(), tiny_model()
    apart.separate(fused_weights(apart))
    assert fused_weights(fused)
    assert not fused_weights(apart)
    wanted, values = gradients(fused), fused.hf_state_dict()
    for key, array in apart.hf_state_dict().items():
        np.testing.assert_array_equal(array, values[key], err_msg=key)
    for key, found in gradients(apart).items():
        np.testing.assert_allclose(found, wanted[key], rtol=1e-4, atol=1e-6, err_msg=key)


def test_a_model_without_values_yet_is_separated_too():
    paddle.seed(5)
    wanted = Qwen3VLForConditionalGeneration.from_config(tiny_config()).hf_state_dict()
    paddle.seed(5)
    model = Qwen3VLForConditionalGeneration.from_config(tiny_config(), materialize=False)
    model.separate(fused_weights(model)[:3])
    assert len(fused_weights(model)) == 3
    model.materialize_all()
    for key, array in model.hf_state_dict().items():
        np.testing.assert_array_equal(array, wanted[key], err_msg=key)


def test_files_do_not_say_what_was_fused(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "fused")
    model.separate(fused_weights(model))
    model.save_pretrained(tmp_path / "apart")
    names = [f"{name}/model.safetensors" for name in ("fused", "apart")]
    fused, apart = ((tmp_path / name).read_bytes() for name in names)
    assert fused == apart


def test_an_adapter_stands_beside_a_linear_of_its_own_in_that_layer_alone():
    model = tiny_model()
    model.add_lora(LoRAConfig(r=2, target_modules=["*.layers.1.*.q_proj"]))
    apart = [
        isinstance(layer, SeparateLinears)
        for decoder_layer in model.decoder_layers
        for layer in (decoder_layer.self_attn.qkv_proj, decoder_layer.mlp.gate_up_proj)
    ]
    assert apart == [False, False, True, False, False, False]
    assert set(model.adapter.targets) == {QUERIES.removesuffix(".weight")}


def test_linears_of_one_weight_are_not_frozen_in_part():
    named = list(tiny_model().hf_named_parameters())
    trained = {name for name, _ in named} - {QUERIES}
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj.*separate them first"):
        freeze_parameters(named, trained)
    assert len(treated_apart(named, trained.__contains__)) == 1


def test_linears_of_one_weight_have_one_rate_and_one_decay():
    named, train = list(tiny_model().hf_named_parameters()), TrainConfig(output_dir="o")
    with pytest.raises(ValueError, match=r"q_proj.* have different settings of their weight decay"):
        Optimizer(named, train, {QUERIES})
    with pytest.raises(ValueError, match="have different settings of their learning rate"):
        Optimizer(named, train, set(), rate_factors={QUERIES: 0.5})
    with pytest.raises(ValueError, match="they are trained together or not at all"):
        Optimizer([(n, p) for n, p in named if n != QUERIES], train, set())


@pytest.mark.parametrize(
    ("setting", "is_frozen"),
    [
        ("model.freeze=['*layers.1.self_attn.q_proj*']", True),
        ("train.weight_decay_exclude=['*layers.1.self_attn.q_proj*']", False),
        ("train.part_learning_rates={'*layers.1.self_attn.q_proj*': 1.0e-20}", True),
    ],
)
def test_a_run_has_apart_what_a_setting_treats_alone(setting, is_frozen, tmp_path):
    run_file = write_tiny_run(tmp_path)
    overrides = [f"train.output_dir={tmp_path / 'out'}", "train.max_steps=2", setting]
    trainer = build_trainer(load_run_config(run_file, overrides))
    model = trainer.runner.model
    before = model.hf_state_dict()
    layers = [decoder_layer.self_attn.qkv_proj for decoder_layer in model.decoder_layers]
    assert [isinstance(layer, SeparateLinears) for layer in layers] == [
        number == 1 for number in range(len(layers))
    ]
    assert trainer.run() is None
    after = model.hf_state_dict()
    assert np.array_equal(after[QUERIES], before[QUERIES]) == is_frozen
    keys = QUERIES.replace("q_proj", "k_proj")
    assert not np.array_equal(after[keys], before[keys])
    saved = read_checkpoint_headers(tmp_path / "out" / "checkpoint-2", "optimizer")
    assert (f"{QUERIES}/moment1" in saved) == (not setting.startswith("model.freeze"))
    assert saved[f"{keys}/moment1"].shape == before[keys].shape[::-1]
