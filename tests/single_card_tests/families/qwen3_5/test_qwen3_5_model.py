"""The decoder of Qwen3.5: on simulated ranks, with adapters, its operations, and what it
refuses."""

import paddle
import pytest

from paddle_vl import LoRAConfig, Qwen3_5ForConditionalGeneration
from paddle_vl.config.families import family_of_folder
from paddle_vl.families.vlm.modeling.delta_flops import DeltaFlops
from paddle_vl.families.vlm.recipe import model_shape
from paddle_vl.families.vlm.training.pipeline import layer_costs
from paddle_vl.parallel.degrees import ParallelDegrees, TopologyPlan, plan_problems
from paddle_vl.testing import (
    EXPERTS_3_5,
    assert_equals_single_device,
    tiny_qwen3_5,
    tiny_qwen3_5_config,
    tiny_qwen3_vl_batch,
)


@pytest.fixture(scope="module", params=[{}, EXPERTS_3_5], ids=["dense", "experts"])
def text(request) -> dict:
    return request.param


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mp_degree", [2, 4])
def test_simulated_ranks_equal_one_device(text, mp_degree, sequence_parallel):
    assert_equals_single_device(
        lambda placement: tiny_qwen3_5(placement, seed=1, **text),
        lambda model: model(**tiny_qwen3_vl_batch()),
        mp_degree,
        sequence_parallel=sequence_parallel,
    )


def test_adapters_train_the_projections_of_both_mixers_and_merge(tmp_path):
    model, batch = tiny_qwen3_5(seed=1), tiny_qwen3_vl_batch()
    before = model(**batch).loss.item()
    model.save_pretrained(tmp_path / "base")
    model = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "base")
    targets = ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
    model.add_lora(LoRAConfig(r=2, target_modules=targets))
    assert {name.rpartition(".")[2] for name in model.adapter.targets} == set(targets)
    assert len(model.adapter.targets) == 2 * 3 + 4
    assert model(**batch).loss.item() == pytest.approx(before, rel=1e-6)
    for name, parameter in model.hf_named_parameters():
        if name.endswith("lora_B.weight"):
            parameter.set_value(paddle.full_like(parameter, 0.05))
    output = model(**batch)
    output.loss.backward()
    trained = [name for name, each in model.hf_named_parameters() if each.grad is not None]
    assert len(trained) == 2 * len(model.adapter.targets)
    model.save_adapter(tmp_path / "adapter")

    def load(placement=None):
        return Qwen3_5ForConditionalGeneration.from_pretrained(
            tmp_path / "adapter", placement=placement
        )

    assert load()(**batch).loss.item() == output.loss.item()
    assert_equals_single_device(load, lambda model: model(**batch), 2)
    model.merge_lora()
    assert model(**batch).loss.item() == pytest.approx(output.loss.item(), rel=1e-5)


def test_an_export_is_refused_with_its_reason(tmp_path):
    tiny_qwen3_5().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Qwen3.5 cannot be exported: the number of chunks"):
        family_of_folder(tmp_path).ask("export", tmp_path, None)


def test_key_heads_must_divide_by_the_ranks():
    shape = model_shape(tiny_qwen3_5_config())
    degrees = ParallelDegrees(mp_degree=8)
    problems = plan_problems(TopologyPlan(degrees, 8, shape))
    assert any("linear_num_key_heads 4 does not divide" in problem for problem in problems)


def test_operations_are_those_of_the_matrix_products(text):
    """By hand, per token of a text without padding; the head and attention's pairs apart."""
    config = tiny_qwen3_5_config(**text)
    counter, batch = DeltaFlops(config), tiny_qwen3_vl_batch([1, 2, 3, 4, 5])
    rule = 8 * (64 * (2 * 4 + (4 + 6) // 2 + 6) + 3 * 4 * 6)
    delta = 16 * (2 * 16 + 48 + 48 + 2 * 8) + 48 * 16
    attention = 16 * (2 * 128 + 2 * 32) + 128 * 16
    mlp = 3 * 16 * (2 * 8 + 16) + 16 * (6 + 1) if text else 3 * 16 * 24
    operations = counter.operations(batch)
    assert operations.forward["tokens"] == 2 * (2 * (delta + rule) + attention + 3 * mlp)
    assert operations.forward["token_pairs"] == 4 * 128
    # Of two gradients each: of the weight and of the input, but for the first layer's input, which
    # is the embedding's.
    assert operations.backward["tokens"] == 2 * operations.forward["tokens"]
    layers, tower, head = layer_costs(config)
    assert layers == [delta + rule + mlp, attention + mlp, delta + rule + mlp]
    assert (tower > 0, head) == (True, 16 * 64)
