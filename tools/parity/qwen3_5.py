"""Golden cases of Qwen3.5: forward and backward, generation with its states, trajectories.

Tolerances are those of the golden README, for float32: activations and logits 6e-5 absolute, of the
first DeltaNet layer's convolution, delta rule and state 5e-6, loss 1e-5, gradients 5e-5 relative to
the largest entry of each tensor. Of most gradients a case has statistics only: the norm is compared
at 5e-5 relative, the largest entry at twice that, the README names no tolerance for it, and the two
sums at 5e-5 of the largest that a gradient of this norm may have, norm times sqrt(n). Where noise
of 1e-7 in the weights changes a gradient by more than a third of that, the tolerance is three times
this change. Trajectories are compared as Qwen3-VL's.

The gated norms of the random models amplify rounding a hundredfold over the decoder, that of the
tower too, of which the reference has as much as this package: its patch embedding is 2e-6 from
float64, and noise of 5e-7 in the embeddings moves layers by up to 3e-4. So every decoder layer gets
the case's own input wherever the case has it, and all that it computes, with the logits behind the
last, is compared entry by entry; elsewhere by the root of their mean squared error, and single
entries at the 3e-4 that this noise makes of them. What the whole model computes from pixels and ids
is compared too: loss, gradients and tokens as above, logits in these two ways.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import paddle

from paddle_vl import Qwen3_5ForConditionalGeneration
from paddle_vl.nn.attention import PackedSamples
from paddle_vl.nn.delta_rule import gated_delta_rule
from parity.comparison import CaseReport
from parity.golden import Qwen35Folders, QwenCase
from parity.qwen_vl import (
    SPREAD,
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

FOLDERS = Qwen35Folders
ACTIVATION, FIRST_LAYER, LOSS, GRADIENT = 6e-5, 5e-6, 1e-5, 5e-5
# Single entries behind the whole decoder, see above.
AMPLIFIED = 3e-4
# Of cases whose gradients noise of 1e-7 in the weights changes by more than a third of the
# tolerance, the largest change in eight draws (`check_parity.py qwen3_5 DIR --noise 8`).
NOISE = {
    "moe_multi_image": 2.7e-5, "multi_image_right_pad": 4.4e-5, "packed": 6e-5, "text_only": 1.9e-4,
}  # fmt: skip


def run_cases(golden: Qwen35Folders, cases: list[QwenCase], scale: float, dtype: str):
    """One report per case."""
    for case in cases:
        report = CaseReport(case.name, scale)
        report.unsupported = unsupported(golden, case, case.meta["model"], dtype)
        if not report.unsupported:
            folder = golden.models[case.meta["model"]]
            model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
            if case.kind == "trajectory":
                _run_trajectory(golden, model, case, report)
            else:
                report.golden = case.tensors
                run = _run_generation if case.kind == "generation" else _run_forward
                run(model, case, report)
        yield report


def _run_forward(model, case: QwenCase, report: CaseReport) -> None:
    tensors = case.tensors
    inputs, host, extra, offsets, real_BL = given_of(model, case, report)

    def compare(group: str, name: str, found, rows: Any = ..., tolerance=ACTIVATION) -> None:
        if name in tensors:
            report.absolute(group, name, np.asarray(found)[rows], tolerance, tensors[name][rows])

    for name, value in of_towers(model, inputs):
        compare("tower", name, value)

    output = model(**inputs, **extra)
    with DecoderRecording(model) as recorded, _own_inputs(model, tensors), paddle.no_grad():
        forced = model(**inputs, **extra)
    ends_B = np.ones([len(real_BL)], bool) if offsets is not None else real_BL[:, -1]
    for name, value in recorded.quantities(offsets).items():
        is_first = name.partition(".")[2] in ("conv_out.0", "core_out.0", "state.0")
        tolerance = FIRST_LAYER if is_first else ACTIVATION
        if "state" in name:
            # A state behind padding means nothing.
            compare("states", name, value, ... if offsets is not None else ends_B, tolerance)
        elif name in tensors:
            shape = (*real_BL.shape, *value.shape[1:])
            wanted = tensors[name].reshape(shape)[real_BL]
            found = value.reshape(shape)[real_BL]
            number = int(name.rpartition(".")[2]) if name[-1].isdigit() else 0
            if not number or f"lm.layer_out.{number - 1}" in tensors:
                report.absolute("layers", name, found, tolerance, wanted)
            else:
                report.compared.add(name)
                _compare_amplified("layers", name, found - wanted, report)
    compare_routers(recorded.calls, real_BL, ACTIVATION, report)
    carried = model(**host, **extra)
    last = "logits_last64" in tensors
    name, real_BL = ("logits_last64", real_BL[:, -64:]) if last else ("logits", real_BL)
    wanted = tensors[name][real_BL]
    report.absolute("layers", name, last_logits(forced, last)[real_BL], ACTIVATION, wanted)
    made = {"": output, ", indices carried": carried}
    for note, each in made.items():
        errors = last_logits(each, last)[real_BL] - wanted
        _compare_amplified("logits", f"{name}{note}", errors, report)
    compare_losses(made, LOSS, report)
    report.all_compared()
    output.loss.backward()
    compare_gradients(model, case, report, max(GRADIENT, 3 * NOISE.get(case.name, 0.0)))


def last_logits(output, only_last: bool) -> np.ndarray:
    logits = array(output.logits)
    return logits[:, -64:] if only_last else logits


def _compare_amplified(group: str, name: str, errors: np.ndarray, report: CaseReport) -> None:
    """Compare what a whole model computes, by the root of the mean square and entry by entry."""
    root = np.sqrt(np.square(errors, dtype=np.float64).mean())
    report.absolute(f"{group} rms", f"{name}, rms", root, ACTIVATION, 0.0)
    report.absolute(group, f"{name}, largest", np.abs(errors).max(), AMPLIFIED, 0.0)


@contextmanager
def _own_inputs(model, tensors: dict[str, np.ndarray]) -> Iterator[None]:
    """Inside the block, every decoder layer and the final norm get the case's own token rows."""
    decoder = model.language_model

    def replaced(given: np.ndarray, layer, inputs: tuple) -> tuple:
        return (paddle.to_tensor(given).reshape(inputs[0].shape), *inputs[1:])

    hooks = []
    for i, layer in enumerate([*decoder.layers, decoder.norm]):
        name = f"lm.layer_out.{i - 1}" if i else "lm.inputs_embeds"
        if name in tensors:
            hooks.append(layer.register_forward_pre_hook(partial(replaced, tensors[name])))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class DecoderRecording(Recording):
    """Records the layers of the decoder and what is inside its DeltaNet layers."""

    def __init__(self, model):
        decoder = model.language_model
        named = {"embedding": decoder.embedding, "norm_out": decoder.norm}
        for i, layer in enumerate(decoder.layers):
            mixer = getattr(layer, layer.mixer_name)
            named |= {f"layer_out.{i}": layer, f"mixer_out.{i}": mixer}
            if layer.mixer_name == "linear_attn":
                named |= {
                    f"conv_out.{i}": mixer.conv1d,
                    f"g.{i}": mixer.decay,
                    f"core_out.{i}": mixer.core,
                    f"gated_norm.{i}": mixer.norm,
                }
            if layer.has_experts:
                named |= {f"moe_out.{i}": layer.mlp, f"router.{i}": layer.mlp.gate}
        super().__init__(named, array)

    def quantities(self, offsets: np.ndarray | None) -> dict[str, np.ndarray]:
        """What the decoder computed, as rows `[T, ...]`; states `[S, N, C, V]`."""
        outputs = {name: calls[0] for name, calls in self.calls.items() if "input" not in name}
        embedded = outputs.pop("embedding")
        cos, sin = map(array, embedded["rotary_pos_emb"])
        tokens = cos.shape[0] * cos.shape[1]
        found = {"rope_cos": cos, "rope_sin": sin, "inputs_embeds": embedded["hidden_states"]}
        for name, output in outputs.items():
            if not name.startswith("router"):
                # A layer with experts may return its routing sums too.
                found[name] = output[0] if isinstance(output, tuple) else output
        quantities = {f"lm.{name}": np.reshape(x, (tokens, -1)) for name, x in found.items()}
        packed = None if offsets is None else PackedSamples(offsets, cos.shape[1])
        for name in (name for name in outputs if name.startswith("core_out")):
            number = name.partition(".")[2]
            given = self.calls[f"{name} input"][0][:5]
            quantities[f"lm.beta.{number}"] = given[4].reshape(tokens, -1)
            with paddle.no_grad():
                tensors = [paddle.to_tensor(x) for x in given]
                _, state = gated_delta_rule(*tensors, packed=packed, keeps_state=True)
            quantities[f"lm.state.{number}"] = array(state)
        return quantities


def _run_generation(model, case: QwenCase, report: CaseReport) -> None:
    """Greedy tokens, logits of every step, positions, and states of every DeltaNet layer."""
    compare = partial(compare_states, report=report, tolerance=ACTIVATION)
    logits = generated_logits(model, case, compare, report)
    report.compared.add("step_logits")
    _compare_amplified("logits", "step_logits", logits - case.tensors["step_logits"], report)
    report.all_compared()


def generated_logits(
    model, case: QwenCase, compare: Callable[[list, str], None], report: CaseReport
) -> np.ndarray:
    """Logits `[B, steps, V]` of greedy generation, whose tokens are compared.

    Args:
        compare: called with the caches and `prefill` or `end`.
    """
    report.compared |= {name for name in case.tensors if name.startswith("in.")}
    logits: list[np.ndarray] = []
    made: list[list] = []
    own_caches = model.new_caches

    def new_caches(*args):
        made.append(own_caches(*args))
        return made[-1]

    def keep(step_logits: np.ndarray) -> None:
        if not logits:
            compare(made[0], "prefill")
        logits.append(step_logits)

    model.new_caches = new_caches
    compare_generated(model, case, keep, report)
    compare(made[0], "end")
    return np.stack(logits, axis=1)


def compare_states(caches: list, when: str, report: CaseReport, tolerance: float) -> None:
    """States of all DeltaNet layers; the reference keeps one input more, which no step reads."""
    for i, cache in enumerate(caches):
        if not hasattr(cache, "state_BNCV"):
            continue
        name = f"{when}.conv_state.{i}"
        inputs = array(cache.inputs_BJE).transpose(0, 2, 1)
        allowed = FIRST_LAYER if i == 0 else tolerance
        wanted = report.golden[name][:, :, -inputs.shape[2] :]
        report.absolute("states", name, inputs, allowed, wanted)
        state = array(cache.state_BNCV)
        report.absolute("states", f"{when}.recurrent_state.{i}", state, allowed)


def _run_trajectory(golden: Qwen35Folders, model, case: QwenCase, report: CaseReport) -> None:
    """Loss and gradient norm of each step of training."""
    batch = golden.case(case.meta["batch_from"]).inputs()
    wanted = case.meta["steps"]
    steps = train_steps(model, batch, case.meta["optimizer"], len(wanted))
    compare_steps(steps, wanted, case.meta[SPREAD], LOSS, GRADIENT, report)
