"""The optimizer, what it trains, and the moving average of the weights (`train.ema`)."""

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from paddle_vl.cli.main import main
from paddle_vl.config.schema import EMAConfig, TrainConfig
from paddle_vl.families.vlm.settings import PARTS
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.testing import record_host_reads
from paddle_vl.train.freeze import (
    decayed_names,
    rate_factors,
    trained_names,
)
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.schedule import average_decay
from paddle_vl.train.step import train_step
from tests.single_card_tests.train.batches import (
    assert_same_bits,
    image_batch,
    optimizer_of,
    parameters_of,
    vl_runner,
)
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.single_card_tests.train.whole_runs import build, evaluated
from tests.support.finished_runs import arrays_of, metrics_of
from tests.support.states import states_of
from tests.support.tiny import tiny_model


@pytest.fixture(scope="module")
def batch():
    return image_batch([[1, 2, 3, 4, 5], [6, 7, 8]], [2, 1])


def test_frozen_parameters_get_no_gradient_state_or_update(batch):
    model = tiny_model()
    optimizer = optimizer_of(model, ["model.visual.*", "*.layers.0.mlp.*"])
    before = model.hf_state_dict()
    train_step(vl_runner(model), optimizer, [batch], 0.01)
    changed = {
        name for name, value in model.hf_state_dict().items() if (value != before[name]).any()
    }
    names = {name for name, _ in model.hf_named_parameters()}
    frozen = {name for name in names if name.startswith("model.visual.") or "layers.0.mlp" in name}
    assert changed == names - frozen
    assert {name.partition("/")[0] for name in states_of(optimizer)} == names - frozen


RATES = {"vision": 1e-3}
REFUSED = [
    (lambda model, names: trained_names(names, ["model.visul.*"]), "fits none of .*model.visual"),
    (lambda model, names: decayed_names(names, ["bias"]), "weight_decay_exclude: the pattern 'bi"),
    (lambda model, names: trained_names(names, ["*"]), "nothing to train"),
    (
        lambda model, names: optimizer_of(model, ["vision"], part_learning_rates=RATES),
        r"part_learning_rates.*'vision' fits none of .* nearest",
    ),
]


@pytest.mark.parametrize(("call", "told"), REFUSED)
def test_patterns_that_fit_nothing_or_leave_nothing_are_refused(call, told):
    model = tiny_model()
    with pytest.raises(ValueError, match=told):
        call(model, dict(model.hf_named_parameters()))


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
    optimizer = optimizer_of(
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
    first = optimizer_of(wanted, ["vision"], **settings)
    run(wanted, first, range(2))
    for _, parameter in wanted.hf_named_parameters():
        parameter.stop_gradient = False
    second = optimizer_of(wanted, **settings)
    second.load_state(states_of(second) | states_of(first))
    run(wanted, second, range(2, 4))

    found = tiny_model()
    unfreeze = [{"at": 2, "patterns": ["vision"]}]
    optimizer = optimizer_of(found, flat=has_buckets, unfreeze=unfreeze, **settings)
    run(found, optimizer, range(4))
    for got, expected in (
        (found.hf_state_dict(), wanted.hf_state_dict()),
        (states_of(optimizer), states_of(second)),
    ):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("max_norm", [0.25, 1e6, 0.0])
def test_clipping_is_torchs_formula_over_trained_parameters(batch, max_norm):
    model = tiny_model()
    optimizer = optimizer_of(model, ["model.visual.*"], max_grad_norm=max_norm)
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
    (parameter,) = parameters_of(rng, [(4, 5)], "bfloat16")
    start = parameter.astype("float32").numpy()
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
    optimizer = optimizer_of(tiny_model())
    state = states_of(optimizer)
    moved = {**state, "x/moment1": state["lm_head.weight/moment1"]}
    del moved["lm_head.weight/moment1"]
    with pytest.raises(ValueError, match="missing lm_head.weight/moment1; unexpected x/moment1"):
        optimizer.load_state(moved)
    misshapen = {**state, "lm_head.weight/moment2": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match=r"lm_head.weight/moment2 is \[3\], not \[64, 16\]"):
        optimizer.load_state(misshapen)


DECAYS = [0.5, 0.9, 0.75]


@pytest.mark.parametrize("flat", [False, True], ids=["per tensor", "buckets"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_follows_its_formula_and_is_exchanged_with_the_weights(dtype, flat):
    rng = np.random.default_rng(0)
    parameters = parameters_of(rng, [(3, 50), (7,)], dtype)
    named = [("a", parameters[0]), ("b", parameters[1])]
    train = TrainConfig(output_dir="o", max_grad_norm=0.0, ema=EMAConfig())
    optimizer = Optimizer(named, train, set(), MasterWeights(parameters))
    if flat:
        optimizer.use_buckets()
    masters = {name: optimizer.store.shard_of(p) for name, p in named}
    expected = {name: master.numpy().astype(np.float64) for name, master in masters.items()}
    for step, decay in enumerate([*DECAYS, 0.5]):
        is_good = paddle.to_tensor(step < len(DECAYS))
        for parameter in parameters:
            factors = paddle.to_tensor(rng.normal(size=parameter.shape), dtype="float32")
            (parameter.astype("float32") * factors).sum().backward()
        optimizer.store.end_micro_batch()
        optimizer.store.end_backward()
        norm = float(optimizer.squared_norm().sqrt())
        with record_host_reads() as reads:
            if step < len(DECAYS):
                optimizer.update(0.1, norm)
            optimizer.update_average(decay, is_good)
        assert reads == []
        optimizer.clear_gradients()
        if step < len(DECAYS):
            for name, master in masters.items():
                expected[name] = decay * expected[name] + (1 - decay) * master.numpy()
    before = states_of(optimizer)
    live = [parameter.astype("float32").numpy() for parameter in parameters]
    for name, array in expected.items():
        assert before[f"{name}/ema"].dtype == np.float32
        np.testing.assert_allclose(before[f"{name}/ema"], array, rtol=0, atol=1e-6)
    optimizer.swap_average()
    for name, parameter in named:
        rounded = paddle.to_tensor(before[f"{name}/ema"]).astype(dtype).astype("float32")
        np.testing.assert_array_equal(parameter.astype("float32").numpy(), rounded.numpy())
    optimizer.swap_average()
    after = states_of(optimizer)
    assert_same_bits(after, before)
    for parameter, array in zip(parameters, live, strict=True):
        np.testing.assert_array_equal(parameter.astype("float32").numpy(), array)


def test_decays_of_openpi_and_lerobot():
    assert [average_decay(EMAConfig(), step) for step in (1, 2, 9)] == [0.99] * 3
    warmup = EMAConfig(schedule="warmup")
    found = [average_decay(warmup, step) for step in (1, 2, 17, 10**7)]
    assert found == pytest.approx([0.0, 1 - 2**-0.75, 1 - 17**-0.75, 0.9999])


def train(run_file, output_dir, *more: str) -> None:
    data = run_file.with_name("test.jsonl")
    given = ["train.ema={decay: 0.6}", *evaluated(data), *more]
    assert build(run_file, output_dir, *given).run() is None


def test_a_run_evaluates_and_leaves_the_average(tmp_path, capsys):
    run_file = write_tiny_run(tmp_path)
    train(run_file, tmp_path / "out")
    train(run_file, tmp_path / "plain", "train.ema=null")
    found, other = (arrays_of(tmp_path / name / "checkpoint-4") for name in ("out", "plain"))
    assert found.keys() - other.keys() == {f"{n}/ema" for n in other if "/" not in n}
    assert_same_bits({name: found[name] for name in other}, other)
    for name, array in load_file(tmp_path / "out" / "final" / "model.safetensors").items():
        average = found[f"{name}/ema"]
        # State has the layout of this package.
        assert any(np.array_equal(array, a.reshape(array.shape)) for a in (average, average.T)), (
            name
        )
    lines = [line for line in metrics_of(tmp_path / "out") if "eval_loss" in line]
    # Last, since a command turns compiled kernels on.
    assert main(["evaluate", str(tmp_path / "out"), "--data", str(tmp_path / "test.jsonl"),
                 "--max-new-tokens", "1"]) == 0  # fmt: skip
    assert f"{lines[-1]['eval_loss']:.4f}" in capsys.readouterr().out
