"""Golden cases of Qwen4-Exp: forward and backward, generation with its states, trajectories.

Tolerances are those of the golden README, for float32: activations and logits 4e-5 absolute, of the
first DeltaNet layer and the first embedding of n-grams 5e-6, loss 5e-6, gradients 5e-5 relative to
the largest entry of each tensor, with embeddings of n-grams 1e-6 over the case's smallest argument
of a gate more, whose root divides the error by it. Rows of tables, tokens and positions are equal.
"""

from typing import Any

import numpy as np
import paddle

from paddle_vl import Qwen4ExpForConditionalGeneration
from paddle_vl.nn.dispatch import watched
from parity.comparison import CaseReport
from parity.golden import Qwen4Folders, QwenCase
from parity.qwen_vl import (
    compare_generated,
    compare_gradients,
    compare_losses,
    compare_routers,
    compare_steps,
    given_of,
    of_towers,
    train_steps,
    unsupported,
)
from parity.recording import Recording, array

FOLDERS = Qwen4Folders
ACTIVATION, FIRST_LAYER, LOSS, GRADIENT, GATE = 4e-5, 5e-6, 5e-6, 5e-5, 1e-6


def run_cases(golden: Qwen4Folders, cases: list[QwenCase], scale: float, dtype: str):
    """One report per case."""
    for case in cases:
        report = CaseReport(case.name, scale)
        report.unsupported = unsupported(golden, case, case.meta["model"], dtype, "qwen4_exp")
        if not report.unsupported:
            folder = golden.models[case.meta["model"]]
            model = Qwen4ExpForConditionalGeneration.from_pretrained(folder, dtype=dtype)
            if case.kind == "trajectory":
                _run_trajectory(golden, model, case, report)
            else:
                report.golden = case.tensors
                run = _run_generation if case.kind == "generation" else _run_forward
                run(model, case, report)
        yield report


def _gradient_tolerance(case: QwenCase) -> float:
    smallest = case.meta.get("min_abs_ple_gate")
    return GRADIENT + (GATE / smallest if smallest else 0.0)


def _run_forward(model: Any, case: QwenCase, report: CaseReport) -> None:
    tensors = case.tensors
    inputs, host, extra, _, real_BL = given_of(model, case, report)
    for name, value in of_towers(model, inputs):
        if name in tensors:
            report.absolute("tower", name, value, ACTIVATION)
    rows: list[np.ndarray] = []

    def watch(operation: Any, args: Any, result: Any) -> None:
        if operation.__name__ == "ngram_rows":
            rows.append(array(result))

    output = model(**inputs, **extra)
    with _DecoderRecording(model) as recorded, watched(watch), paddle.no_grad():
        model(**inputs, **extra)
    compare_routers(recorded.calls, real_BL, ACTIVATION, report)
    text = model.config.text_config
    numbers = [i for i in range(text.num_hidden_layers) if text.has_ngrams(i)]
    for i, found in zip(numbers, rows, strict=True):
        if (name := f"lm.ple_ids.{i}") in tensors:
            wanted = tensors[name]
            found = found.reshape(wanted.shape)
            report.exact("ngrams", name, found[real_BL], wanted[real_BL])
    first = {f"{kind}.{numbers[0]}" for kind in ("lm.ple_embed", "lm.ple_value")} if rows else set()
    for name, value in recorded.quantities().items():
        if name in tensors:
            wanted = tensors[name]
            found = value.reshape([*real_BL.shape, *wanted.shape[2:]])
            tolerance = FIRST_LAYER if name in first else ACTIVATION
            report.absolute("layers", name, found[real_BL], tolerance, wanted[real_BL])
    carried = model(**host, **extra)
    name = "logits_last64" if "logits_last64" in tensors else "logits"
    last = slice(-64, None) if name == "logits_last64" else slice(None)
    made = {"": output, ", indices carried": carried}
    for note, each in made.items():
        found = array(each.logits)[:, last][real_BL[:, last]]
        wanted = tensors[name][real_BL[:, last]]
        report.absolute("logits", f"{name}{note}", found, ACTIVATION, wanted)
    compare_losses(made, LOSS, report)
    output.loss.backward()
    compare_gradients(model, case, report, _gradient_tolerance(case))


class _DecoderRecording(Recording):
    """Records the layers of the decoder and their parts."""

    def __init__(self, model: Any):
        decoder = model.language_model
        named = {"embedding": decoder.embedding, "norm_out": decoder.norm}
        for i, layer in enumerate(decoder.layers):
            mixer = getattr(layer, layer.mixer_name)
            named |= {
                f"layer_out.{i}": layer, f"mixer_out.{i}": mixer, f"moe_out.{i}": layer.mlp,
                f"attn.{i}": layer.attn_hyper_connection, f"mlp.{i}": layer.mlp_hyper_connection,
                f"router.{i}": layer.mlp.gate,
            }  # fmt: skip
            if layer.mixer_name == "linear_attn":
                named |= {f"conv_out.{i}": mixer.conv1d, f"core_out.{i}": mixer.core}
            if layer.ple is not None:
                named |= {
                    f"ple_out.{i}": layer.ple,
                    f"ple_embed.{i}": layer.ple.ple_embedding,
                    f"ple_value.{i}": layer.ple.value_proj,
                }
        super().__init__(named, array)

    def quantities(self) -> dict[str, np.ndarray]:
        """What the decoder computed, a row per token."""
        found = {}
        for name, calls in self.calls.items():
            output = calls[0]
            kind, _, number = name.partition(".")
            if name.endswith(" input") or kind == "router":
                continue
            if kind in ("attn", "mlp"):
                found[f"lm.{kind}_in.{number}"] = output[0]
                found[f"lm.{kind}_inject.{number}"] = output[1]
            elif kind == "embedding":
                found["lm.inputs_embeds"] = output["hidden_states"]
            else:
                found[f"lm.{name}"] = output[0] if isinstance(output, tuple) else output
        return found


def _run_generation(model: Any, case: QwenCase, report: CaseReport) -> None:
    """Greedy tokens, logits of every step, positions, and states."""
    logits: list[np.ndarray] = []
    made: list[list[Any]] = []
    own_caches = model.new_caches

    def new_caches(*args: Any) -> list[Any]:
        made.append(own_caches(*args))
        return made[-1]

    def keep(step_logits: np.ndarray) -> None:
        if not logits:
            _compare_states(made[0], "prefill", report)
        logits.append(step_logits)

    model.new_caches = new_caches
    compare_generated(model, case, keep, report)
    found = np.stack(logits, axis=1)
    report.absolute("logits", "step_logits", found, ACTIVATION)
    _compare_states(made[0], "end", report)


def _compare_states(caches: list[Any], when: str, report: CaseReport) -> None:
    """States of DeltaNet layers and of n-grams; the reference keeps one convolved input more."""
    for i, cache in enumerate(caches):
        if not hasattr(cache, "state_BNCV"):
            continue
        inputs = array(cache.inputs_BJE).transpose(0, 2, 1)
        wanted = report.golden[f"{when}.conv_state.{i}"][:, :, -inputs.shape[2] :]
        report.absolute("states", f"{when}.conv_state.{i}", inputs, ACTIVATION, wanted)
        state = array(cache.state_BNCV)
        report.absolute("states", f"{when}.recurrent_state.{i}", state, ACTIVATION)
        if hasattr(cache, "ngram_ids_BN"):
            report.exact("states", f"{when}.ngram_context.{i}", array(cache.ngram_ids_BN))
            found = array(cache.ngram_rows_BPC).transpose(0, 2, 1)
            report.absolute("states", f"{when}.ple_conv_state.{i}", found, ACTIVATION)


def _run_trajectory(golden: Qwen4Folders, model: Any, case: QwenCase, report: CaseReport) -> None:
    """Loss and gradient norm of each step of training."""
    batch = golden.case(case.meta["batch_from"]).inputs()
    wanted = case.meta["steps"]
    steps = train_steps(model, batch, case.meta["optimizer"], len(wanted))
    drift = case.meta["relative_drift_float32_vs_float64"]
    spread = {"loss": max(drift["loss"]), "grad_norm_relative": max(drift["grad_norm"])}
    compare_steps(steps, wanted, spread, LOSS, GRADIENT, report)
