"""The choice between an operation's plain implementation and its kernels, and what kernels keep.

Results of kernels: the tests of the operations and the golden cases.
"""

import gc
import inspect

import numpy as np
import paddle
import pytest

from paddle_vl.nn import dispatch
from paddle_vl.nn.dispatch import (
    OPERATIONS,
    Kernel,
    choose_kernels,
    chosen_kernels,
    operation,
    use_kernels,
)
from paddle_vl.nn.examples import QUICK, Make, examples_of, name_of, tensors
from paddle_vl.nn.kernels import description
from tests.support.implementations import implementation

pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture
def doubled(monkeypatch):
    """An operation that reports which implementation ran."""
    monkeypatch.setattr(dispatch, "OPERATIONS", [])

    @operation
    def doubled(x, more=0):
        """Twice."""
        return "plain", 2 * x + more

    def kernel(name, device="cpu", source="Paddle", **settings):
        return Kernel(device, source, lambda x, more=0: (name, x + x + more), **settings)

    doubled.kernels = [
        kernel("C", source="C", fits=lambda x, more=0: x.ndim == 1),
        kernel("of few", fits=lambda x, more=0: x.shape[0] < 9),
        kernel("gpu", "gpu"),
    ]
    return doubled


def test_the_first_kernel_runs_that_fits(doubled, monkeypatch):
    name, value = doubled(paddle.ones([2]), more=1)
    assert name == "of few"
    assert value.tolist() == [3, 3]
    assert doubled(paddle.ones([9]))[0] == "plain"
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Twice.")
    monkeypatch.setattr(dispatch, "_has_compiled", True)
    assert doubled(paddle.ones([2]))[0] == "C"
    assert doubled(paddle.ones([2, 2]))[0] == "of few"


def test_a_choice_holds_for_the_process(doubled, monkeypatch):
    monkeypatch.setattr(dispatch, "_has_compiled", True)
    x = paddle.ones([2])
    for choice, wanted in (("plain", "plain"), ("uncompiled", "of few"), ("fused", "C")):
        choose_kernels(choice)
        assert chosen_kernels() == choice
        assert doubled(x)[0] == wanted
    choose_kernels("plain")
    with use_kernels("cpu"):
        assert doubled(x)[0] == "C"


def test_a_choice_can_be_forced(doubled):
    x = paddle.ones([2])
    with use_kernels("plain"):
        assert doubled(x)[0] == "plain"
        with use_kernels("cpu"):
            assert doubled(x)[0] == "of few"
        with pytest.raises(ValueError, match="stop"), use_kernels("cpu"):
            raise ValueError("stop")
        assert doubled(x)[0] == "plain"
    with use_kernels("gpu"):
        assert doubled(x)[0] == "gpu"
    with use_kernels(lambda of: lambda x: (of.__name__, x)):
        assert doubled(x)[0] == "doubled"
    assert doubled(x)[0] == "of few"


def test_one_line_tells_what_is_chosen(monkeypatch):
    counts = {}
    for choice in ("fused", "uncompiled", "plain"):
        for has_compiled in (True, False):
            monkeypatch.setattr(dispatch, "_has_compiled", has_compiled)
            choose_kernels(choice)
            counts[choice, has_compiled] = description("cpu")
    assert counts["fused", True].startswith("kernels (fused, cpu): ")
    assert {key for key, line in counts.items() if " C" in line} == {("fused", True)}
    assert {key for key, line in counts.items() if "oneDNN" in line} >= {("uncompiled", False)}
    assert counts["plain", True] == f"kernels (plain, cpu): {len(OPERATIONS)} plain"


@pytest.mark.parametrize("kernels", ["cpu", "compiled", "a100"])
def test_arguments_may_be_named(kernels):
    """A kernel's own names, and those of what says whether it fits, do not matter."""
    with implementation(kernels), paddle.no_grad():
        for operation in OPERATIONS:
            for make in examples_of(operation).values():
                names = list(inspect.signature(operation.plain).parameters)[1:]
                results = []
                for is_named in (False, True):
                    # Anew: some write into a cache.
                    first, *rest = tensors(make(np.random.default_rng(0), QUICK), "float32")
                    named = dict(zip(names, rest, strict=False)) if is_named else {}
                    paddle.seed(0)
                    results.append(operation(first, *(() if named else rest), **named))
                pairs = zip(*map(paddle.utils.flatten, results), strict=True)
                assert all(one is two or (one == two).all() for one, two in pairs)


def kept_after(operation, make: Make) -> int:
    """Contexts of backward passes that are alive after a forward pass whose output is dropped."""
    inputs = tensors(make(np.random.default_rng(0), QUICK), "float32")
    with paddle.enable_grad():
        operation(*inputs)
    gc.collect()
    return sum(type(found).__name__.endswith("_backward") for found in gc.get_objects())


@pytest.mark.parametrize("kernels", ["cpu", "compiled", "a100"])
def test_an_output_without_a_backward_pass_is_freed(kernels):
    # A loss of weight 0 is computed and has none: what it kept would stay at every step.
    kept = []
    gc.collect()
    # Objects of before are left out of each search, which would take a second among those of a
    # long session.
    gc.freeze()
    try:
        with implementation(kernels):
            for operation in OPERATIONS:
                for name, make in examples_of(operation).items():
                    before = kept_after(operation, make)
                    if kept_after(operation, make) > before:
                        kept.append((name_of(operation), name))
    finally:
        gc.unfreeze()
    assert not kept
