"""Golden cases of Qwen3-VL: forward and backward, generation, training trajectories, processor.

Tolerances are those of the golden README, for float32: activations and logits 2e-5 absolute, loss
5e-6, gradients 2e-5 relative to the largest entry of each tensor. Along a trajectory it is ten
times what noise of 1e-7 in the weights changes in the reference, where that is more: another
processor rounds in as many places. (AdamW has a large eps there. With 1e-8 it divides a gradient by
its magnitude, noise moves weights by full steps, and the trajectory tells nothing.) The experts of
a token are compared as a set, sorted by number.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.batch.positions import mrope_position_ids, restart_offsets
from paddle_vl.batch.visual_index import host_visual_indices
from paddle_vl.config.schema import TrainConfig
from paddle_vl.families.vlm.inputs.collate import prepared
from paddle_vl.families.vlm.training.objective import VLBatchAdapter, VLLoss
from paddle_vl.train.freeze import decayed_names
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.step import ModelRunner, train_step
from parity.comparison import CaseReport
from parity.golden import QwenCase, QwenFolders
from parity.qwen_vl_processor import compare_processor
from parity.qwen_vl_recording import DecoderRecording, router_quantities, tower_quantities
from parity.recording import array, gradients

FOLDERS = QwenFolders
ACTIVATION, LOSS, GRADIENT, NOISE_FACTOR = 2e-5, 5e-6, 2e-5, 10
# Of a trajectory's file: its largest differences under noise, and how it names the optimizer.
SPREAD = "spread_for_weights_times_1_plus_1e_7_noise"
_ADAMW = re.compile(
    r"AdamW lr (?P<learning_rate>\S+) betas \((?P<adam_beta1>\S+),(?P<adam_beta2>\S+)\) "
    r"eps (?P<adam_epsilon>\S+) weight_decay (?P<weight_decay>\S+) on every parameter\b.*, "
    r"clip_grad_norm (?P<max_grad_norm>\S+)"
)


def run_cases(golden: QwenFolders, cases: list[QwenCase], scale: float, dtype: str):
    """One report per case, or per model of a case with several models."""
    for case in cases:
        if case.kind == "processor":
            yield from compare_processor(case, scale)
        elif case.kind == "trajectory":
            yield from _run_trajectories(golden, case, scale, dtype)
        else:
            report = CaseReport(case.name, scale, case.tensors)
            report.unsupported = unsupported(golden, case, case.meta["model"], dtype)
            if not report.unsupported:
                model = _load(golden, case.meta["model"], dtype)
                run = _run_generation if case.kind == "generation" else _run_forward
                run(model, case, report)
            yield report


def config_of(golden: QwenFolders, name: str) -> dict:
    return json.loads((golden.models[name] / "config.json").read_text(encoding="utf-8"))


def _load(golden: QwenFolders, name: str, dtype: str) -> Qwen3VLForConditionalGeneration:
    return Qwen3VLForConditionalGeneration.from_pretrained(golden.models[name], dtype=dtype)


def unsupported(
    golden: QwenFolders, case: QwenCase, name: str, dtype: str, family: str = "qwen3"
) -> str:
    """Why the case cannot run with that model; empty if it can.

    Args:
        family: how model types begin.
    """
    if name not in golden.models:
        return f"model {name} is in none of the folders; they have {sorted(golden.models)}"
    if not (model_type := str(config_of(golden, name).get("model_type"))).startswith(family):
        return f"model type {model_type}"
    if unknown := set(case.meta.get("extra_forward_kwargs") or {}) - {"output_router_logits"}:
        return f"forward arguments {sorted(unknown)}"
    if case.kind == "trajectory" and dtype != "float32":
        # Without float32 masters small updates would be rounded away.
        return f"dtype {dtype}: the trajectory is for float32"
    return ""


def given_of(model, case: QwenCase, report: CaseReport) -> tuple[dict, dict, dict, Any, np.ndarray]:
    """HF's inputs of a case, those of a collator, further arguments, offsets of packed samples, and
    which tokens are real; compares the positions."""
    tensors, inputs = case.tensors, case.inputs()
    real_BL, offsets = real_tokens(inputs), tensors.get("in.cu_seqlens")
    host = host_batch(model, inputs, offsets)
    report.compared |= {name for name in tensors if name.startswith("in.")}
    if offsets is not None:
        # HF marks packed samples only by restarting positions.
        inputs = inputs | {"position_ids": tensors["in.position_ids"]}
        restarts = restart_offsets(tensors["in.position_ids"][0])
        report.exact("positions", "in.cu_seqlens", restarts)
    compare_positions(model, host, inputs, offsets, report)
    extra = case.meta.get("extra_forward_kwargs") or {}
    return inputs, host, extra, offsets, real_BL


def compare_losses(made: Mapping[str, Any], tolerance: float, report: CaseReport) -> None:
    """Compare the losses of outputs, by notes, and the first one's of routers."""
    tensors = report.golden
    for note, each in made.items():
        wanted = tensors["loss"].item()
        report.absolute("loss", f"loss{note}", each.loss.item(), tolerance, wanted)
    if "aux_loss" in tensors:
        own = made[""].aux_loss
        found = float("nan") if own is None else own.item()
        report.absolute("loss", "aux_loss", found, tolerance, tensors["aux_loss"].item())


def _run_forward(
    model: Qwen3VLForConditionalGeneration, case: QwenCase, report: CaseReport
) -> None:
    tensors = case.tensors
    inputs, host, extra, _, real_BL = given_of(model, case, report)

    def compare(group: str, name: str, found, rows=None) -> None:
        if name in tensors:
            rows = ... if rows is None else rows
            report.absolute(group, name, np.asarray(found)[rows], ACTIVATION, tensors[name][rows])

    for name, value in of_towers(model, inputs):
        compare("levels" if "deepstack" in name else "tower", name, value)

    with DecoderRecording(model) as recorded:
        output = model(**inputs, **extra)
    quantities = recorded.quantities()
    if "visual_pos_masks" in tensors:
        masks = quantities.get("visual_pos_masks", np.zeros_like(real_BL))
        report.exact("positions", "visual_pos_masks", masks)
    compare_routers(recorded.calls, real_BL, ACTIVATION, report)
    for name, value in quantities.items():
        is_level = name.startswith("lm.deepstack_visual_embeds")
        group = "levels" if is_level else "embeds" if "embeds" in name else "layers"
        compare(group, name, value, None if is_level else real_BL)
    carried = model(**host, **extra)
    made = {"": output, ", indices carried": carried}
    for group, (note, each) in zip(("logits", "carried"), made.items(), strict=True):
        logits, wanted = array(each.logits)[real_BL], tensors["logits"][real_BL]
        report.absolute(group, f"logits{note}", logits, ACTIVATION, wanted)
    compare_losses(made, LOSS, report)
    report.all_compared()
    output.loss.backward()
    compare_gradients(model, case, report, GRADIENT)


def compare_gradients(
    model, case: QwenCase, report: CaseReport, tolerance: float, of_norm: float | None = None
) -> None:
    """Compare every gradient, in full or by its statistics, and the set of parameters without.

    Args:
        of_norm: tolerance of the norm of all; None for the same.
    """
    found, norm = gradients(model)
    known = set(case.gradients) | set(case.gradient_stats)
    for key, value in found.items():
        if key not in known:
            report.fail("grads", key, "has a gradient, none in the case")
        if key in case.gradients:
            report.relative("grads", key, value, tolerance, case.gradients[key])
        if key in case.gradient_stats:
            wanted, flat = case.gradient_stats[key], value.astype(np.float64).ravel()
            length = float(np.linalg.norm(flat))
            report.relative("stats", f"{key} norm", length, tolerance, wanted[0])
            largest = np.abs(flat).max()
            report.relative("stats", f"{key} largest", largest, 2 * tolerance, wanted[2])
            sums = (flat.sum(), (flat * np.cos(np.arange(flat.size))).sum())
            allowed = tolerance * wanted[0] * flat.size**0.5
            report.absolute("sums", f"{key} sums", sums, allowed, wanted[[1, 3]])
    for key in sorted(known - set(found)):
        report.fail("grads", key, "has no gradient, one in the case")
    without = sorted({item.key for item in model.stored_parameters()} - set(found))
    if without != sorted(case.meta["params_without_grad"]):
        report.fail("grads", "params_without_grad", f"without a gradient here: {without}")
    of_norm = of_norm or tolerance
    report.relative("grads", "global norm", norm, of_norm, case.meta["grad_global_norm"])


def compare_positions(model, host: dict, inputs: dict, offsets: Any, report: CaseReport) -> None:
    """Compare the positions of real tokens, and their differences behind images."""
    tensors, real_BL = report.golden, real_tokens(inputs)
    if "in.position_ids" in tensors:
        wanted = tensors["in.position_ids"][-3:][:, real_BL]
        report.exact("positions", "in.position_ids", host["position_ids"][:, real_BL], wanted)
    if "rope_deltas" in tensors:
        given = dict(zip(POSITION_INPUTS, values_of(inputs, POSITION_INPUTS), strict=True))
        deltas = model.position_ids(**given, cu_seqlens=offsets)[1]
        report.exact("positions", "rope_deltas", deltas, tensors["rope_deltas"].reshape(-1))


def of_towers(model, inputs: dict) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of what the tower computes of images, and of videos."""
    for kind, pixels, grid in (
        ("vis_image", "pixel_values", "image_grid_thw"),
        ("vis_video", "pixel_values_videos", "video_grid_thw"),
    ):
        if pixels in inputs:
            for name, value in tower_quantities(model, inputs[pixels], inputs[grid]).items():
                yield f"{kind}.{name}", value


def compare_routers(calls: dict, real_BL: np.ndarray, tolerance: float, report: CaseReport) -> None:
    """Compare experts, their weights and the logits of every router at real tokens."""
    real_T, tensors = real_BL.reshape(-1), report.golden
    for name, value in router_quantities(calls, tensors):
        # Padding is not routed.
        wanted = tensors[name].reshape(real_T.size, -1)[real_T]
        if "indices" in name:
            report.exact("router", name, value, np.sort(wanted, axis=-1))
            continue
        if "weights" in name:
            experts = tensors[name.replace("weights", "indices")][real_T]
            wanted = np.take_along_axis(wanted, experts.argsort(axis=-1), axis=-1)
        report.absolute("router", name, value, tolerance, wanted)


POSITION_INPUTS = ("input_ids", "attention_mask", "image_grid_thw", "video_grid_thw")


def values_of(inputs: dict, names: tuple[str, ...]) -> list:
    return [inputs.get(name) for name in names]


def real_tokens(inputs: dict[str, np.ndarray]) -> np.ndarray:
    """`[B, L]` bool, True at real tokens; a batch of packed samples has no mask."""
    mask = inputs.get("attention_mask")
    return np.ones(inputs["input_ids"].shape, bool) if mask is None else mask.astype(bool)


def host_batch(model, inputs: dict[str, np.ndarray], offsets: np.ndarray | None) -> dict:
    """The batch with the fields that a collator adds."""
    config = model.config
    ids = {"image_token_id": config.image_token_id, "video_token_id": config.video_token_id}
    merge = config.vision_config.spatial_merge_size
    rows = {
        f"num_{kind}_rows": int(inputs[f"{kind}_grid_thw"].prod(axis=1).sum()) // merge**2
        for kind in ("image", "video")
        if f"{kind}_grid_thw" in inputs
    }
    position_ids, _ = mrope_position_ids(
        *values_of(inputs, POSITION_INPUTS), spatial_merge_size=merge, cu_seqlens=offsets, **ids
    )
    return {
        **inputs,
        **({} if offsets is None else {"cu_seqlens": offsets}),
        "position_ids": position_ids,
        **host_visual_indices(inputs["input_ids"], **rows, **ids),
        "num_target_tokens": int((inputs["labels"][:, 1:] != -100).sum()),
        "has_left_padding": bool((np.diff(real_tokens(inputs).astype(int), axis=1) > 0).any()),
    }


def _run_generation(
    model: Qwen3VLForConditionalGeneration, case: QwenCase, report: CaseReport
) -> None:
    """Greedy tokens, the logits of every step and the positions behind them."""
    logits: list[np.ndarray] = []
    compare_generated(model, case, logits.append, report)
    report.absolute("logits", "step_logits", np.stack(logits, axis=1), ACTIVATION)


def compare_generated(
    model, case: QwenCase, on_logits: Callable[[np.ndarray], object], report: CaseReport
) -> None:
    """Compare greedy tokens and the positions behind them.

    The reference decoded with its end token suppressed, so all rows run to the end.

    Args:
        on_logits: called with the logits of every step.
    """
    tensors, inputs = case.tensors, case.inputs()
    length = tensors["generated"].shape[1]
    config = config_of(case.folders, case.meta["model"])
    found = model.generate(
        **inputs,
        max_new_tokens=length,
        min_new_tokens=length,
        eos_token_id=config["text_config"]["eos_token_id"],
        on_logits=on_logits,
    )
    report.exact("tokens", "generated", found)
    position_ids, deltas_B = model.position_ids(*values_of(inputs, POSITION_INPUTS))
    real_BL = inputs["attention_mask"].astype(bool)
    wanted = {name: tensors[f"{name}_position_ids"][1:] for name in ("prefill", "decode")}
    name = "prefill_position_ids"
    report.exact("positions", name, position_ids[:, real_BL], wanted["prefill"][:, real_BL])
    report.exact("positions", "rope_deltas", deltas_B, tensors["rope_deltas"].reshape(-1))
    steps = np.arange(wanted["decode"].shape[-1])
    decode_BS = (real_BL.sum(axis=1) + deltas_B)[:, None] + steps
    decode_3BS = np.broadcast_to(decode_BS, (3, *decode_BS.shape))
    report.exact("positions", "decode_position_ids", decode_3BS, wanted["decode"])


def _run_trajectories(golden: QwenFolders, case: QwenCase, scale: float, dtype: str):
    """Train every model of the case; compare loss and gradient norm of each step."""
    batch = golden.case(case.meta["batch_from"]).inputs()
    for name, wanted in case.meta["steps"].items():
        report = CaseReport(f"{case.name}[{name}]", scale)
        report.unsupported = unsupported(golden, case, name, dtype)
        if not report.unsupported:
            steps = train_steps(
                _load(golden, name, dtype), batch, case.meta["optimizer"], len(wanted)
            )
            compare_steps(steps, wanted, case.meta[SPREAD][name], LOSS, GRADIENT, report)
        yield report


def compare_steps(
    steps: list[tuple[float, float]],
    wanted: list[dict[str, float]],
    spread: dict[str, float],
    loss: float,
    gradient: float,
    report: CaseReport,
) -> None:
    """Compare losses and gradient norms of a trajectory.

    Args:
        spread: under noise, of its file.
        loss, gradient: tolerances of a single pass.
    """
    of_loss = max(loss, NOISE_FACTOR * spread["loss"])
    of_norm = max(gradient, NOISE_FACTOR * spread["grad_norm_relative"])
    for i, (found, step) in enumerate(zip(steps, wanted, strict=True)):
        report.absolute("loss", f"loss of step {i}", found[0], of_loss, step["loss"])
        report.relative("norm", f"norm of step {i}", found[1], of_norm, step["grad_norm"])


def train_steps(
    model, batch: dict, optimizer_text: str, num_steps: int
) -> list[tuple[float, float]]:
    """Loss and gradient norm before clipping of each step, by the package's own training step with
    the optimizer that the case's file names."""
    settings = training_of(optimizer_text)
    parameters = list(model.hf_named_parameters())
    optimizer = Optimizer(parameters, settings, decayed_names(dict(parameters), []))
    runner = ModelRunner(model, VLLoss(), VLBatchAdapter())
    micro_batches = [prepared(host_batch(model, batch, None))]
    steps = [
        train_step(runner, optimizer, micro_batches, settings.learning_rate)
        for _ in range(num_steps)
    ]
    return [(float(step.terms[0]), float(step.grad_norm)) for step in steps]


def training_of(text: str) -> TrainConfig:
    """The settings of AdamW in a trajectory's file."""
    found = _ADAMW.fullmatch(text)
    if found is None:
        raise ValueError(f"optimizer {text!r}: expected the form {_ADAMW.pattern}")
    settings: Any = {name: float(value) for name, value in found.groupdict().items()}
    return TrainConfig(output_dir="unused", weight_decay_exclude=[], **settings)
