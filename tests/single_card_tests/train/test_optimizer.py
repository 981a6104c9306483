"""The optimizer and the parameters that it trains.

Guarantees: frozen parameters have neither gradients nor state; a pattern without a match is
refused; clipping is torch's formula over trained parameters only; weight decay leaves out the
parameters of its patterns; the state is saved and loaded bit for bit under HF names; components can
be frozen by name and have their own learning rates, which may fall from layer to layer; what is
frozen for some steps begins later, bit for bit, with fresh state.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.config.schema import TrainConfig
from paddle_vl.families.vlm.settings import PARTS
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.train.freeze import (
    decayed_names,
    freeze_parameters,
    frozen_steps,
    rate_factors,
    trained_names,
)
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.step import train_step
from tests.single_card_tests.train.batches import image_batch, vl_runner
from tests.support.states import states_of
from tests.support.tiny import tiny_model


def build(model, freeze=(), **settings):
    train = TrainConfig(output_dir="o", **settings)
    names = dict(model.hf_named_parameters())
    trained = trained_names(names, freeze, parts=PARTS)
    return Optimizer(
        freeze_parameters(list(model.hf_named_parameters()), trained),
        train,
        decayed_names(names, train.weight_decay_exclude),
        rate_factors=rate_factors(train, trained, PARTS),
        frozen_steps=frozen_steps(train, trained, PARTS),
    )


@pytest.fixture(scope="module")
def batch():
    return image_batch([[1, 2, 3, 4, 5], [6, 7, 8]], [2, 1])


def test_frozen_parameters_get_no_gradient_state_or_update(batch):
    model = tiny_model()
    optimizer = build(model, ["model.visual.*", "*.layers.0.mlp.*"])
    before = model.hf_state_dict()
    train_step(vl_runner(model), optimizer, [batch], 0.01)
    changed = {
        name for name, value in model.hf_state_dict().items() if (value != before[name]).any()
    }
    names = {name for name, _ in model.hf_named_parameters()}
    frozen = {name for name in names if name.startswith("model.visual.") or "layers.0.mlp" in name}
    assert changed == names - frozen
    assert {name.partition("/")[0] for name in states_of(optimizer)} == names - frozen


def test_pattern_that_fits_nothing_names_the_nearest():
    named = list(tiny_model().hf_named_parameters())
    with pytest.raises(ValueError, match=r"'model\.visul\.\*' fits none of .*model\.visual"):
        trained_names(dict(named), ["model.visul.*"])
    with pytest.raises(ValueError, match="weight_decay_exclude: the pattern 'bias'"):
        decayed_names(dict(named), ["bias"])


def test_freezing_everything_is_refused():
    with pytest.raises(ValueError, match="nothing to train"):
        trained_names(dict(tiny_model().hf_named_parameters()), ["*"])


@pytest.mark.parametrize("part", ["vision", "mergers", "language"])
def test_freezing_a_part_leaves_the_others(part):
    names = {name for name, _ in tiny_model().hf_named_parameters()}
    mergers = {name for name in names if "merger" in name}
    visual = {name for name in names if name.startswith("model.visual.")}
    frozen = {"vision": visual - mergers, "mergers": mergers, "language": names - visual}[part]
    assert frozen
    assert trained_names(names, [part], parts=PARTS) == names - frozen


def test_learning_rates_of_parts_are_peaks_of_the_one_schedule(batch):
    """AdamW's first update is the rate times the sign of the gradient, whatever its size; with
    decay, rate times decay times the weight is subtracted too."""
    rates = {"vision": 1e-3, "mergers": 4e-3, "model.visual.blocks.0.*": 2e-4}
    model = tiny_model()
    optimizer = build(
        model, learning_rate=1e-2, part_learning_rates=rates, adam_epsilon=1e-30, weight_decay=0.5
    )
    before = model.hf_state_dict()
    vl_runner(model).accumulate_gradients([batch], [batch["num_target_tokens"]])
    # Half the peak.
    optimizer.step(5e-3)
    after, seen = model.hf_state_dict(), set()
    for name, parameter in model.hf_named_parameters():
        if "merger" in name:
            rate = 2e-3
        elif name.startswith("model.visual.blocks.0."):
            rate = 1e-4
        else:
            rate = 5e-4 if name.startswith("model.visual.") else 5e-3
        decay = 0.5 if len(parameter.shape) > 1 else 0.0
        moved = np.abs(before[name] * (1 - rate * decay) - after[name])
        assert np.median(moved[moved > 1e-6]) == pytest.approx(rate, rel=2e-2), name
        seen.add(rate)
    assert len(seen) == 4


def test_learning_rates_of_layers_fall_towards_the_input():
    """The scheme of BEiT, with the number of layers of the whole model, whatever is trained."""
    names = [name for name, _ in tiny_model().hf_named_parameters()]
    decays = {"vision": 0.5, "language": 0.1}
    train = TrainConfig(
        output_dir="o",
        learning_rate=1.0,
        layer_decay=decays,
        part_learning_rates={"vision": 4.0, "mergers": 3.0},
    )
    trained = {name for name in names if "layers.2." not in name}
    factors = rate_factors(train, trained, PARTS, names)
    layers, blocks = "model.language_model.layers", "model.visual.blocks"
    expected = {
        f"{blocks}.1.norm1.bias": 4 * 0.5,
        f"{blocks}.0.attn.qkv.weight": 4 * 0.5**2,
        "model.visual.patch_embed.proj.weight": 4 * 0.5**3,
        "model.visual.merger.norm.bias": 3.0,
        "model.language_model.norm.weight": 1.0,
        f"{layers}.1.mlp.down_proj.weight": 0.1**2,
        f"{layers}.0.mlp.down_proj.weight": 0.1**3,
        "model.language_model.embed_tokens.weight": 0.1**4,
    }
    assert {name: factors[name] for name in expected} == pytest.approx(expected)
    assert not factors.keys() - trained


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("has_buckets", [False, True])
def test_what_is_frozen_for_some_steps_begins_with_fresh_state(batch, has_buckets, has_zeros):
    """The oracle trains without it, and goes on with an optimizer of all. Sharded parameters have
    gradients of zeros while they are frozen."""

    def run(model, optimizer, steps) -> None:
        for step in steps:
            optimizer.begin_step(step)
            for parameter in filter(lambda p: p.stop_gradient and has_zeros, model.parameters()):
                parameter.grad = paddle.zeros_like(parameter)
            train_step(vl_runner(model), optimizer, [batch], 0.01)

    settings = {"weight_decay": 0.5, "max_grad_norm": 0.0}
    wanted = tiny_model()
    first = build(wanted, ["vision"], **settings)
    run(wanted, first, range(2))
    for _, parameter in wanted.hf_named_parameters():
        parameter.stop_gradient = False
    second = build(wanted, **settings)
    second.load_state(states_of(second) | states_of(first))
    run(wanted, second, range(2, 4))

    found = tiny_model()
    unfreeze = [{"at": 2, "patterns": ["vision"]}]
    optimizer = build(found, unfreeze=unfreeze, **settings)
    if has_buckets:
        optimizer.use_buckets()
    run(found, optimizer, range(4))
    for got, expected in (
        (found.hf_state_dict(), wanted.hf_state_dict()),
        (states_of(optimizer), states_of(second)),
    ):
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_learning_rate_of_a_part_that_is_not_trained_is_refused():
    with pytest.raises(ValueError, match=r"part_learning_rates.*'vision' fits none of .* nearest"):
        build(tiny_model(), ["vision"], part_learning_rates={"vision": 1e-3})


def test_weight_decay_moves_only_decayed_parameters():
    """With zero gradients AdamW's update is the decay alone: p * (1 - rate * decay)."""
    model = tiny_model()
    optimizer = build(model, weight_decay=0.5)
    before = model.hf_state_dict()
    for _, parameter in optimizer.parameters:
        (parameter * 0.0).sum().backward()
    optimizer.step(0.1)
    after = model.hf_state_dict()
    for name, parameter in model.hf_named_parameters():
        factor = 0.95 if len(parameter.shape) > 1 else 1.0
        np.testing.assert_allclose(after[name], before[name] * factor, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("max_norm", [0.25, 1e6, 0.0])
def test_clipping_is_torchs_formula_over_trained_parameters(batch, max_norm):
    model = tiny_model()
    optimizer = build(model, ["model.visual.*"], max_grad_norm=max_norm)
    vl_runner(model).accumulate_gradients([batch], [batch["num_target_tokens"]])
    # A fused parameter has several names but counts once.
    before = {p.name: p.grad.numpy().copy() for _, p in optimizer.parameters}
    expected = np.sqrt(sum((grad.astype(np.float64) ** 2).sum() for grad in before.values()))
    norm = optimizer.squared_norm().sqrt()
    assert norm.dtype == paddle.float32
    assert float(norm) == pytest.approx(expected, rel=1e-6)
    optimizer.clip_gradients(float(norm))
    factor = min(1.0, max_norm / (expected + 1e-6)) if max_norm else 1.0
    for name, parameter in optimizer.parameters:
        expected = before[parameter.name] * factor
        np.testing.assert_allclose(parameter.grad.numpy(), expected, rtol=1e-5, err_msg=name)


def test_state_round_trips_bit_for_bit(batch):
    """One step, a move of weights and state to new objects and one step equal two steps."""
    model = tiny_model()
    optimizer = build(model, weight_decay=0.1)
    train_step(vl_runner(model), optimizer, [batch], 0.01)
    other = tiny_model(seed=5)
    other.set_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    moved = build(other, weight_decay=0.1)
    moved.load_state(states_of(optimizer))
    train_step(vl_runner(model), optimizer, [batch], 0.01)
    train_step(vl_runner(other), moved, [batch], 0.01)
    for name, value in model.hf_state_dict().items():
        np.testing.assert_array_equal(other.hf_state_dict()[name], value, err_msg=name)
    for name, value in states_of(optimizer).items():
        np.testing.assert_array_equal(states_of(moved)[name], value, err_msg=name)


def half_parameter(values: np.ndarray) -> paddle.Tensor:
    weight = paddle.to_tensor(values).astype("bfloat16")
    return paddle.base.framework.EagerParamBase.from_tensor(weight, name="half_weight")


def with_masters(parameter: paddle.Tensor, **settings) -> Optimizer:
    train = TrainConfig(output_dir="o", **settings)
    return Optimizer([("a.weight", parameter)], train, {"a.weight"}, MasterWeights([parameter]))


def rounded(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest bfloat16, in float32."""
    return paddle.to_tensor(values.astype(np.float32)).astype("bfloat16").astype("float32").numpy()


def test_half_precision_training_is_adamw_in_float32_on_rounded_gradients():
    """Three steps of two micro-batches against the formula. Gradients come in bfloat16 and are
    summed in float32; the master weights are never bfloat16."""
    rng = np.random.default_rng(0)
    start = rounded(rng.normal(size=(4, 5)))
    parameter = half_parameter(start)
    settings = {"weight_decay": 0.1, "adam_beta2": 0.95, "adam_epsilon": 1e-8}
    optimizer = with_masters(parameter, **settings)
    store, rate = optimizer.store, 1e-3
    master, first, second = start.astype(np.float64), 0.0, 0.0
    for step in range(1, 4):
        total = np.zeros((4, 5), np.float32)
        for _ in range(2):
            grad = rounded(rng.normal(size=(4, 5)) * 10.0 ** rng.integers(-4, 3))
            (parameter.astype("float32") * paddle.to_tensor(grad)).sum().backward()
            assert parameter.grad.dtype == paddle.bfloat16
            store.end_micro_batch()
            assert parameter.grad is None
            total = total + grad
        store.end_backward()
        optimizer.step(rate)
        optimizer.clear_gradients()
        first = 0.9 * first + 0.1 * total
        second = 0.95 * second + 0.05 * total.astype(np.float64) ** 2
        update = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.95**step)) + 1e-8)
        master = master * (1 - rate * 0.1) - rate * update
        found = states_of(optimizer)["a.weight/master_weight"]
        np.testing.assert_allclose(found, master, rtol=2e-6, atol=1e-7)
        np.testing.assert_array_equal(parameter.astype("float32").numpy(), rounded(found))
    # Steps this small would vanish in bfloat16 weights.
    assert np.abs(found - start).max() < 0.01
    assert (found != rounded(found)).mean() > 0.9


def test_state_of_other_parameters_is_refused_naming_all():
    optimizer = build(tiny_model())
    state = states_of(optimizer)
    moved = {**state, "x/moment1": state["lm_head.weight/moment1"]}
    del moved["lm_head.weight/moment1"]
    with pytest.raises(ValueError, match="missing lm_head.weight/moment1; unexpected x/moment1"):
        optimizer.load_state(moved)
    misshapen = {**state, "lm_head.weight/moment2": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match=r"lm_head.weight/moment2 is \[3\], not \[64, 16\]"):
        optimizer.load_state(misshapen)
