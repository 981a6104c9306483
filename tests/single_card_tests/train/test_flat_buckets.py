"""AdamW over flat buckets. The oracle is the same `Optimizer` without buckets.

Numbers of launches, and bytes that an update moves, are counted.
"""

from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import _C_ops

from paddle_vl.config.schema import TrainConfig
from paddle_vl.families.vlm.inputs.collate import prepared
from paddle_vl.nn import flat_buckets
from paddle_vl.nn.flat_buckets import fill_gradient
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.testing import record_host_reads
from paddle_vl.train import optimizer as optimizer_module
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.step import train_step
from tests.single_card_tests.train.batches import (
    assert_same_bits,
    image_batch,
    image_fields,
    optimizer_of,
    parameters_of,
    vl_runner,
)
from tests.support.operators import launches, recorded_operators
from tests.support.states import states_of
from tests.support.tiny import tiny_model

IMAGES = image_batch([[1, 2, 3, 4, 5], [6, 7, 8]], [2, 1])
TEXT = {
    name: value
    for name, value in image_fields([[1, 2, 3, 4, 5]], [2]).items()
    if "pixel" not in name and "grid" not in name and "visual" not in name
}
TEXT = prepared(TEXT | {"input_ids": np.where(TEXT["input_ids"] >= 60, 9, TEXT["input_ids"])})


def build(model, flat: bool, **settings) -> Optimizer:
    rates = {"vision": 1e-3, "mergers": 4e-3}
    given = {"weight_decay": 0.1, "learning_rate": 1e-2, "part_learning_rates": rates} | settings
    return optimizer_of(model, ["*.layers.0.mlp.*"], flat, **given)


def state_of(model, optimizer) -> dict[str, np.ndarray]:
    return model.hf_state_dict() | states_of(optimizer)


class OfTwo(SingleRank):
    """One of two ranks, of which the other adds zeros."""

    world_size = 2

    def sum_gradients(self, tensors):
        for tensor, _ in tensors:
            fill_gradient(tensor)


def trained(flat: bool, batches, ranks=ONE_RANK, **settings):
    model = tiny_model()
    optimizer = build(model, flat, **settings)
    for number, batch in enumerate(batches):
        rate = 0.01 / (1 + number)
        outcome = train_step(vl_runner(model), optimizer, [batch], rate, ranks)
        assert bool(outcome.is_good)
    return model, optimizer


@pytest.mark.parametrize(("steps", "elements"), [("itit", None), ("ti", None), ("it", 512)])
def test_flat_updates_have_the_bits_of_updates_per_tensor(steps, elements, monkeypatch):
    """In a step without images the tower has no gradient: it is not updated, and its powers of beta
    stay behind."""
    batches = [{"i": IMAGES, "t": TEXT}[step] for step in steps]
    settings: dict = {"max_grad_norm": 0.0}
    if "t" in steps:
        # The tower is in the same buckets as the language model.
        settings["part_learning_rates"] = {}
    wanted = trained(False, batches, **settings)
    if elements is not None:
        # Many small buckets.
        monkeypatch.setattr(flat_buckets, "BUCKET_ELEMENTS", elements)
    found = trained(True, batches, **settings)
    assert (len(found[1].tensors) > 12) == (elements is not None)
    assert_same_bits(state_of(*found), state_of(*wanted))
    assert all(parameter.grad is None for parameter in found[0].parameters())
    powers = {
        state.item()
        for name, state in found[1].state_tensors().items()
        if name.endswith("beta1_pow_acc")
    }
    assert len(powers) == 1 + ("t" in steps)


@pytest.mark.parametrize("flat", [False, True], ids=["per tensor", "flat"])
def test_what_no_rank_reaches_is_left_as_it_is(flat):
    batches = [IMAGES, TEXT, IMAGES, TEXT]
    found = trained(flat, batches, OfTwo(), max_grad_norm=0.0)
    wanted = trained(flat, batches, max_grad_norm=0.0)
    assert_same_bits(state_of(*found), state_of(*wanted))


def test_clipping_by_one_norm_has_the_same_bits(monkeypatch):
    """The norm is summed over buckets in another order, so it is given here."""
    norms = []

    def given(optimizer, ranks=None):
        optimizer.collect_gradients()
        norms.append(plain(optimizer))
        return paddle.full([], 30.0)

    plain = Optimizer.squared_norm
    monkeypatch.setattr(Optimizer, "squared_norm", given)
    wanted = trained(False, [IMAGES, TEXT], max_grad_norm=0.1)
    found = trained(True, [IMAGES, TEXT], max_grad_norm=0.1)
    assert_same_bits(state_of(*found), state_of(*wanted))
    per_tensor, flat = norms[:2], norms[2:]
    np.testing.assert_allclose([float(n) for n in flat], [float(n) for n in per_tensor], rtol=1e-5)


@pytest.mark.parametrize("flat_first", [False, True], ids=["to buckets", "from buckets"])
def test_saved_state_goes_on_with_the_same_bits_in_either_form(flat_first):
    batches = [IMAGES, TEXT, TEXT]
    source = trained(flat_first, batches, max_grad_norm=0.0)
    saved = state_of(*source)
    weights = source[0].hf_state_dict()
    target = tiny_model()
    for name, parameter in target.named_parameters():
        parameter.set_value(dict(source[0].named_parameters())[name])
    optimizer = build(target, not flat_first, max_grad_norm=0.0)
    optimizer.load_state({name: saved[name] for name in saved.keys() - weights.keys()})
    assert_same_bits(state_of(target, optimizer), saved)
    for model, of_model in (source, (target, optimizer)):
        train_step(vl_runner(model), of_model, [IMAGES], 0.01)
    assert_same_bits(state_of(target, optimizer), state_of(*source))


def test_half_precision_parameters_are_rounded_from_flat_masters():
    """Gradients of two micro-batches are summed in float32; the third parameter has none in some
    steps. Shapes leave gaps in the buckets."""
    shapes = [(3, 50), (128,), (7,), (4, 5, 6)]
    found = []
    for flat in (False, True):
        rng = np.random.default_rng(4)
        parameters = parameters_of(rng, shapes, "bfloat16")
        optimizer = Optimizer(
            [(str(number), parameter) for number, parameter in enumerate(parameters)],
            TrainConfig(output_dir="o", weight_decay=0.1, max_grad_norm=0.0),
            {"0", "3"},
            MasterWeights(parameters),
        )
        if flat:
            optimizer.use_buckets()
            assert len(optimizer.tensors) == 2
        for step in range(4):
            for _ in range(2):
                for number, parameter in enumerate(parameters):
                    grad = paddle.to_tensor(rng.normal(size=parameter.shape), dtype="float32")
                    if number != 2 or step % 2:
                        (parameter.astype("float32") * grad).sum().backward()
                optimizer.store.end_micro_batch()
                assert all(parameter.grad is None for parameter in parameters)
            optimizer.store.end_backward()
            optimizer.update(0.01, float(optimizer.squared_norm().sqrt()))
            optimizer.clear_gradients()
        arrays = states_of(optimizer)
        for number, parameter in enumerate(parameters):
            assert parameter.dtype == paddle.bfloat16
            arrays[str(number)] = parameter.astype("float32").numpy()
        found.append(arrays)
    assert_same_bits(found[1], found[0])


def test_launches_of_an_update_do_not_grow_with_the_number_of_tensors():
    numbers = {}
    for flat in (False, True):
        model = tiny_model()
        optimizer = build(model, flat, max_grad_norm=1e-3)
        for _ in range(2):
            vl_runner(model).accumulate_gradients([IMAGES], [IMAGES["num_target_tokens"]])
            norm = float(optimizer.squared_norm().sqrt())
            with record_host_reads() as reads:
                numbers[flat] = sum(launches(partial(optimizer.update, 0.01, norm)).values())
            assert reads == []
            optimizer.clear_gradients()
        num_buckets = len(optimizer.tensors) if flat else 0
    num_tensors = len({id(p) for _, p in optimizer.parameters})
    # Three learning rates, with and without decay.
    assert num_buckets == 6
    assert numbers[False] > 2 * num_tensors
    # The rate of a bucket, its clipping and its update; the rate of the step.
    assert numbers[True] <= 3 * num_buckets + 1


# Any: a type checker does not count the arguments behind a star.
ADAMW: Any = _C_ops.adamw_


def adamw_of_a_gpu(half, grad, rate, moment1, moment2, most, power1, power2, master, *settings):
    """AdamW with master weights, which Paddle has on GPUs only: by its kernel for float32."""
    # Neither AMSGrad nor a flag on the device.
    assert [most, settings[0]] == [None, None]
    assert (half.dtype, half.shape) == (paddle.bfloat16, grad.shape)
    assert {x.dtype for x in (grad, rate, moment1, moment2, master)} == {paddle.float32}
    assert all(power.place.is_cpu_place() for power in (power1, power2))
    *others, in_master, use_global_powers, amsgrad = settings[1:]
    assert (in_master, use_global_powers, amsgrad) == (True, False, False)
    ADAMW(
        master, grad, rate, moment1, moment2, None, power1, power2, None, None,
        *others, False, False, False,
    )  # fmt: skip
    paddle.assign(master.astype("bfloat16"), half)


def updated(monkeypatch, max_grad_norm: float, on_gpu: bool = True):
    """A step of bfloat16 parameters, and the bytes that its update reads and writes for each value
    and operator."""
    rng = np.random.default_rng(4)
    parameters = parameters_of(rng, [(3, 128), (128,), (256,)], "bfloat16")
    train = TrainConfig(output_dir="o", weight_decay=0.1, max_grad_norm=max_grad_norm)
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    optimizer = Optimizer(named, train, {"0", "1", "2"}, MasterWeights(parameters))
    optimizer.use_buckets()
    for parameter in parameters:
        factors = paddle.to_tensor(rng.normal(size=parameter.shape), dtype="float32")
        (parameter.astype("float32") * factors).sum().backward()
    optimizer.store.end_micro_batch()
    optimizer.store.end_backward()
    with monkeypatch.context() as patch:
        if on_gpu:
            patch.setattr(optimizer_module, "_updates_and_rounds", lambda half: True)
            patch.setattr(_C_ops, "adamw_", adamw_of_a_gpu)
        with recorded_operators() as calls:
            optimizer.update(0.01, 30.0)
    total = sum(parameter.size for parameter in parameters)
    found = states_of(optimizer)
    found |= {name: parameter.astype("float32").numpy() for name, parameter in named}
    # What is no part of the values: the rate.
    moved = {call.name: num_bytes(call) / total for call in calls if num_bytes(call) > total}
    assert len(moved) == sum(num_bytes(call) > total for call in calls)
    return found, moved


def num_bytes(call) -> int:
    """Bytes that an operator reads and writes."""
    if call.name == "adamw_":
        half, grad, _, *moments = call.arguments[:5]
        # With a master the half-precision tensor is written, not read.
        changed = [*moments, half if call.arguments[8] is None else call.arguments[8]]
        tensors = [grad, *changed * 2, *([] if call.arguments[8] is None else [half])]
    else:
        tensors = [x for x in (*call.arguments, *call.results) if isinstance(x, paddle.Tensor)]
    return sum(x.size * x.element_size() for x in tensors)


@pytest.mark.parametrize("max_grad_norm", [0.0, 30.1, 1.0], ids=["no limit", "below", "clipped"])
def test_an_update_on_a_gpu_is_one_kernel_with_the_same_bits(monkeypatch, max_grad_norm):
    wanted, _ = updated(monkeypatch, max_grad_norm, on_gpu=False)
    found, moved = updated(monkeypatch, max_grad_norm)
    assert_same_bits(found, wanted)
    # Clipping reads and writes the gradient, in float32.
    of_clipping = {"scale_": 8.0} if max_grad_norm == 1.0 else {}
    assert moved == {"adamw_": 30.0} | of_clipping


def test_a_product_may_add_to_the_flat_gradient():
    """Fleet's fused product gives no gradient to autograd: it makes a float32 `main_grad`, and adds
    to the one that is there."""
    rng = np.random.default_rng(4)
    parameters = parameters_of(rng, [(3, 50), (128,)], "bfloat16")
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    optimizer = Optimizer(named, TrainConfig(output_dir="o"), set(), MasterWeights(parameters))
    optimizer.use_buckets()
    weight, other = parameters
    for number in range(2):
        made = paddle.full([3, 50], 2.0)
        if weight.main_grad is None:
            weight.main_grad = made
        else:
            weight.main_grad.add_(made)
        (other.astype("float32") * (number + 1.0)).sum().backward()
        optimizer.store.end_micro_batch()
    optimizer.collect_gradients()
    (values,) = optimizer.tensors
    flat = values.main_grad.numpy()
    np.testing.assert_array_equal(flat[:150], 4.0)
    np.testing.assert_array_equal(flat[150:256], 0.0)
    np.testing.assert_array_equal(flat[256:], 3.0)
    optimizer.clear_gradients()
    assert [x.main_grad for x in (weight, other, values)] == [None] * 3


def test_buckets_are_limited_in_elements(monkeypatch):
    monkeypatch.setattr(flat_buckets, "BUCKET_ELEMENTS", 512)
    sizes = [(128, "a"), (100, "a"), (300, "b"), (256, "a"), (1, "a"), (600, "a")]
    made = list(flat_buckets.grouped((paddle.zeros([size]), key) for size, key in sizes))
    # Tensors are padded; a larger one has a bucket of its own.
    assert sorted(made) == [("a", [0, 1, 3]), ("a", [4]), ("a", [5]), ("b", [2])]
