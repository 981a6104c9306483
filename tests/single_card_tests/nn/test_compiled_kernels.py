"""The compiled CPU kernels: equal to the plain operations, or not used, and why."""

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import paddle
import pytest

from paddle_vl.cli.main import main
from paddle_vl.config.schema import LoRAConfig
from paddle_vl.generation.sampling import Sampling
from paddle_vl.nn.attention import causal_attention
from paddle_vl.nn.cpu import compiled, compiler, kernel_check
from paddle_vl.nn.cpu import kernels as cpu
from paddle_vl.nn.delta_rule import gated_delta_rule
from paddle_vl.nn.dispatch import has_compiled, use_kernels
from paddle_vl.nn.examples import OUTPUT, examples_of, name_of, values_and_gradients
from paddle_vl.nn.operations import rms_norm
from paddle_vl.serving.engine import Engine, EngineSettings, Request
from paddle_vl.testing.qwen3_5 import EXPERTS_3_5, tiny_qwen3_5
from paddle_vl.train.step import ModelRunner
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.implementations import require_compiled


@pytest.fixture
def _enabled():
    require_compiled()
    yield
    compiled.disable()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing loaded and an empty cache; compiled without optimization, which is quick."""
    compiled.disable()
    monkeypatch.setattr(cpu, "_library", None)
    monkeypatch.setattr(compiled, "_refused", None)
    monkeypatch.setattr(compiler, "FLAGS", ("-O0", "-fPIC", "-fopenmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "paddle_vl"
    compiled.disable()


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize("operation", kernel_check.compiled_operations(), ids=name_of)
def test_a_kernel_equals_the_plain_operation(operation):
    examples = examples_of(operation)
    assert examples
    for name, make in examples.items():
        inputs = kernel_check.inputs_of(operation, make)
        assert kernel_check.largest_error(operation, inputs) < 3e-6, name


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize(
    # The delta rule has a kernel of its own without gradients.
    "operation",
    [one for one in kernel_check.compiled_operations() if one is not gated_delta_rule],
    ids=name_of,
)
def test_values_without_a_graph_have_the_same_bits(operation):
    for name, make in examples_of(operation).items():
        inputs, found = kernel_check.inputs_of(operation, make), []
        for is_recording in (True, False):
            paddle.seed(3)
            with paddle.set_grad_enabled(is_recording):
                found.append(values_and_gradients(operation, inputs)[OUTPUT])
        np.testing.assert_array_equal(found[1], found[0], err_msg=name)


def test_a_kernel_that_gives_nan_is_named(monkeypatch):
    # The NaN comes second: a comparison with it keeps the first.
    results = iter([{"a": np.ones(2), "b": np.ones(2)}, {"a": np.ones(2), "b": np.full(2, np.nan)}])
    monkeypatch.setattr(kernel_check, "compiled_operations", lambda: [rms_norm])
    monkeypatch.setattr(kernel_check, "values_and_gradients", lambda call, inputs: next(results))
    only = dict([next(iter(examples_of(rms_norm).items()))])
    monkeypatch.setattr(kernel_check, "examples_of", lambda operation: only)
    assert kernel_check.differences() == f"{next(iter(only))} by nan"


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize("scale", [60.0, 600.0])
def test_attention_with_scores_far_outside_of_the_exponential_stays_exact(scale):
    make = examples_of(causal_attention)["causal_attention"]
    inputs = kernel_check.inputs_of(causal_attention, make)
    wide = replace(inputs, args=(scale * inputs.args[0], *inputs.args[1:]))
    assert kernel_check.largest_error(causal_attention, wide) < 2e-3


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize("kind", ["bfloat16", "float64", "empty"])
def test_other_inputs_go_to_the_next_kernel(kind):
    x = paddle.zeros([0, 8]) if kind == "empty" else paddle.randn([3, 8])
    x = x.astype(kind) if kind in ("bfloat16", "float64") else x
    weight = paddle.ones([8]).astype(x.dtype)
    with use_kernels("cpu"):
        assert rms_norm.chosen(x, weight, 1e-6) == rms_norm.plain
        assert rms_norm(x, weight, 1e-6).dtype == x.dtype
        assert rms_norm.chosen(paddle.randn([3, 8]), paddle.ones([8]), 1e-6) == compiled.rms_norm


@pytest.mark.usefixtures("_enabled")
def test_a_strided_input_is_taken_as_it_reads():
    kept = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": True})
    try:
        x = paddle.randn([8, 6]).transpose([1, 0])
        assert not x.is_contiguous()
        with use_kernels("cpu"):
            found = rms_norm(x, paddle.ones([8]), 1e-6)
        wanted = rms_norm.plain(x, paddle.ones([8]), 1e-6)
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-5)
    finally:
        paddle.set_flags(kept)


def assert_not_used(caplog, reason: str) -> None:
    """The same results as before, and one line with the reason however often it is asked."""
    with caplog.at_level(logging.INFO, logger="paddle_vl"):
        assert not compiled.enable()
        assert not compiled.enable()
    assert not has_compiled()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert reason in lines[0]
    x = paddle.randn([3, 8])
    with use_kernels("cpu"):
        found, weight = rms_norm(x, paddle.ones([8]), 1e-6), paddle.ones([8])
        assert rms_norm.chosen(x, weight, 1e-6) == cpu.rms_norm
        np.testing.assert_allclose(found, rms_norm.plain(x, weight, 1e-6), rtol=1e-5)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [((), "no C compiler (cc, gcc, clang)"), (("--no-such-flag",), "--no-such-flag")],
)
def test_without_a_compiler_that_works_the_program_is_the_same(
    fresh, monkeypatch, caplog, flags, reason
):
    if flags:
        monkeypatch.setattr(compiler, "FLAGS", flags)
        compiler.find_compiler()
    else:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        monkeypatch.delenv("CC", raising=False)
    assert_not_used(caplog, reason)
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert not compiled.enable()
    assert not [*fresh.rglob("*.so")]


class Recorded:
    """The library, with the names of the kernels that were called."""

    def __init__(self, library):
        self.library, self.called = library, set()

    def __getattr__(self, name):
        self.called.add(name)
        return getattr(self.library, name)


@pytest.mark.usefixtures("_enabled")
def test_the_setting_of_a_run_chooses_between_them_and_the_kernels_in_paddle(monkeypatch, tmp_path):
    compiled.disable()
    losses = []
    library, run_file = Recorded(cpu.library()), write_tiny_run(tmp_path)
    monkeypatch.setattr(cpu, "_library", library)
    accumulate = ModelRunner.accumulate_gradients

    def accumulated(*args):
        library.called.clear()  # Without those that are compared before the first step.
        terms = accumulate(*args)
        losses.append(float(terms.sum()))
        return terms

    monkeypatch.setattr(ModelRunner, "accumulate_gradients", accumulated)
    command = ["train", str(run_file), "train.max_steps=1", "train.eval_steps=null",
               "train.save_steps=null"]  # fmt: skip
    for name, off in (("old", "train.cpu_kernels=false"), ("new", "train.kernels=uncompiled")):
        assert main([*command, f"train.output_dir={tmp_path / name}", off]) == 0
        assert library.called == set()
    assert main([*command, f"train.output_dir={tmp_path / 'on'}"]) == 0
    assert has_compiled()
    assert library.called >= {
        f"{name}_{direction}" for name in ("attention", "norm")
        for direction in ("forward", "backward")
    } | {"rotate"}  # fmt: skip
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-5)


TOKEN = {"token_self_attention", "token_delta_net", "token_mlp"}
PARTS = TOKEN | {"token_experts"}


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize(
    ("case", "called"),
    [
        ("plain", TOKEN),
        ("engine", TOKEN),
        # Each layer runs part by part.
        ("adapter", set()),
        ("experts", PARTS),
        ("padding", {"token_self_attention", "token_mlp"}),
    ],
)
def test_a_token_of_an_answer_is_a_call_per_part_where_nothing_else_is_in_it(
    monkeypatch, case, called
):
    """Experts have a shared MLP; hidden tokens reach a DeltaNet layer's state."""
    library = Recorded(cpu.library())
    monkeypatch.setattr(cpu, "_library", library)
    model = tiny_qwen3_5(**(EXPERTS_3_5 if case == "experts" else {}))
    if case == "adapter":
        model.add_lora(LoRAConfig(r=2, target_modules=["o_proj", "out_proj", "down_proj"]))
    ids = np.array([[1, 9, 2, 5], [7, 3, 3, 8]])
    mask = np.array([[0, 1, 1, 1], [1, 1, 1, 1]]) if case == "padding" else None
    answers = []
    for choice in ("cpu", "plain"):
        with use_kernels(choice):
            if case == "engine":
                answers.append(_answered(model, ids))
            else:
                found = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4)
                answers.append(found.tolist())
    assert answers[0] == answers[1]
    assert library.called & PARTS == called


def _answered(model, ids: np.ndarray) -> list[list[int | None]]:
    """Answers of an engine."""
    engine = Engine(model, EngineSettings(2, kv_cache_tokens=64))
    engine.start()
    handles = [engine.submit(Request(row, Sampling(4, temperature=0.0))) for row in ids]
    answers = [[event.token_id for event in handle] for handle in handles]
    engine.close()
    return answers


WRONG = {
    "causal_attention": ("inverse[r] = 1.0f / sum;", "inverse[r] = 1.01f / sum;"),
    "rms_norm": ("along /= channels;", "along /= channels + 1;"),
    "apply_rotary": ("o[j] = a[j] * c[j] + a[j + half]", "o[j] = a[j] * c[j] - a[j + half]"),
    "self_attention": ("*= 1.0f / (1.0f + fast_exp(-gate[j]))", "*= fast_exp(-gate[j])"),
    "gated_delta_net": ("wide > 20.0f ? wide : log1pf(expf(wide))", "wide"),
    "read_streams": ("grad_low[j] *= slopes[j]", "grad_low[j] *= 2.0f * slopes[j]"),
    "write_streams": ("along += g[j] * b[j];", "along += g[j];"),
    "routed_experts": ("places[n] = ends[indices[n]]++", "places[ends[indices[n]]++] = n"),
    "gated_rms_norm.sigmoid": ("is_sigmoid ? s * (1.0f - s)", "is_sigmoid ? s"),
    "chosen_attention": ("begins[b + 2] += begins[b + 1]", "begins[b + 2] = begins[b + 1]"),
    "best_blocks": ("is_equal && missing > 0", "is_equal && missing > 1"),
    "swiglu_mlp": ("gated_forward(room, room + inner", "gated_forward(room, room"),
}


def test_wrong_kernels_are_refused(fresh, monkeypatch, tmp_path, caplog):
    source = "".join(file.read_text(encoding="utf-8") for file in compiler.SOURCES)
    for right, wrong in WRONG.values():
        assert right in source
        source = source.replace(right, wrong)
    changed = tmp_path / "kernels.c"
    changed.write_text(source, encoding="utf-8")
    monkeypatch.setattr(compiler, "SOURCES", (changed,))
    assert_not_used(caplog, "they differ from the plain operations: ")
    assert all(name in compiled.refusal() for name in WRONG)


def test_several_may_compile_at_once_and_a_later_process_loads_it(fresh, monkeypatch):
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: compiler.load_kernels(), range(3)))
    (file,) = fresh.iterdir()
    assert oct(fresh.stat().st_mode)[-3:] == "700"
    libraries = file.read_bytes()
    assert b"libiomp5.so" in libraries
    assert b"libgomp" not in libraries
    monkeypatch.setattr(compiler, "_compile", None)
    assert compiler.load_kernels().omp_get_max_threads() > 0


@pytest.mark.parametrize("is_a_file", [True, False])
def test_a_cache_that_cannot_be_used_compiles_for_this_process(
    is_a_file, fresh, monkeypatch, tmp_path
):
    if is_a_file:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        # Others may write into it.
        compiler.cache_folder().chmod(0o777)
    assert compiler.load_kernels().omp_get_max_threads() > 0
    assert is_a_file or not list(fresh.iterdir())
