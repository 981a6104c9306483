"""Golden cases of preference training: log-probabilities, losses, metrics and gradients, and
training trajectories, with the package's own batches, runner, objective and reference.

Tolerances are those of the golden data, for float32: log-probabilities of an answer 5e-5 absolute,
losses 2e-5 relative plus what the errors of log-probabilities make of it (ipo, sppo_hard and dpop
amplify them), gradients 5e-5 relative to the largest entry of each tensor, trajectories 1e-4.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.adapter_files import is_low_rank
from paddle_vl.checkpoint.reading import checkpoint_tensors, stored_value
from paddle_vl.checkpoint.rules import by_parameter
from paddle_vl.config.schema import TrainConfig
from paddle_vl.families.vlm.inputs.collate import PreparedCollator, VLCollator
from paddle_vl.families.vlm.inputs.preference import PreferenceBatch, PreferenceCollator
from paddle_vl.families.vlm.preference.objective import PreferenceAdapter, PreferenceLoss
from paddle_vl.families.vlm.preference.settings import PreferenceConfig
from paddle_vl.families.vlm.training.objective import VLBatchAdapter
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.parallel.ranks import ONE_RANK
from paddle_vl.train.freeze import decayed_names
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.reference import ComparingRunner, Reference
from paddle_vl.train.step import ModelRunner, agree_on_step, train_step
from parity.comparison import CaseReport
from parity.golden import Case, Folders
from parity.recording import gradients

ANSWER, LOSS, GRADIENT, DRIFT = 5e-5, 2e-5, 5e-5, 1e-4
_PREFIX, _SAMPLES = "base_model.model.", 32
# Settings of the losses whose name is not their loss_type.
_SETTINGS: dict[str, dict[str, Any]] = {
    "sigmoid_beta0.5": {"beta": 0.5},
    "robust_ls0.1": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "exo_pair_ls1e-3": {"loss_type": ["exo_pair"], "label_smoothing": 1e-3},
    "sigmoid_norm_beta2": {"loss_type": ["sigmoid_norm"], "beta": 2.0},
    "rpo_alpha0.5": {"rpo_alpha": 0.5},
    "mpo": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "ld_alpha0.5": {"ld_alpha": 0.5},
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "alpha_divergence0.5": {"f_divergence_type": "alpha_divergence"},
    "wpo": {"use_weighting": True},
    "cdpo_ls0.1": {"label_smoothing": 0.1},
    "reference_free": {"reference_free": True},
    "dpop_lambda50": {"loss_type": ["dpop"]},
    "normalize_logps": {"loss_type": ["normalized"]},
    "rpo_per_pair_alpha0.5": {"loss_type": ["sigmoid", "sft_per_pair"], "loss_weights": [1.0, 0.5]},
    "simpo": {"loss_type": ["simpo"], "beta": 2.0},
    "cpo_simpo": {"loss_type": ["simpo", "sft"], "beta": 2.0},
    "cpo_hinge": {"loss_type": ["hinge", "sft"], "reference_free": True},
    "orpo_completion_tokens": {"loss_type": ["orpo"]},
    "orpo_llamafactory": {"loss_type": ["or", "sft_per_pair"]},
    "kto_weights1.33_1_beta0.5": {"loss_type": ["kto"], "beta": 0.5, "desirable_weight": 1.33},
}
# Not offered: a margin from scores of the data, and learning the prompt with its image pads.
_LEFT_OUT = ("offset_alpha0.5", "orpo_trl")


@dataclass(frozen=True)
class StoredArray:
    """A tensor of a checkpoint that is in memory."""

    values: np.ndarray
    dtype: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, *, must_be_finite: bool = True) -> np.ndarray:
        return self.values


class PreferenceCase(Case):
    """A case of preference training."""

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        return load_file(self.file.with_name("tensors.safetensors"))

    @cached_property
    def samples(self) -> dict[str, np.ndarray]:
        return load_file(self.file.with_name("grad_samples.safetensors"))

    @cached_property
    def full(self) -> dict[str, np.ndarray]:
        file = self.file.with_name("grads_full.safetensors")
        return load_file(file) if file.is_file() else {}


class PreferenceFolders(Folders[PreferenceCase]):
    """Cases of preference training, and the models, which may lie in `qwen_vl` beside a folder."""

    def __init__(self, folders: list[Path]):
        super().__init__(folders)
        roots = [*folders, *(folder.parent / "qwen_vl" / "models" for folder in folders)]
        found = [file for root in roots for file in sorted(root.rglob("config.json"))]
        self.models = {file.parent.name: file.parent for file in found}

    def _case(self, file: Path) -> PreferenceCase | None:
        kinds = {"case.json": "answers", "traj.json": "trajectory"}
        kind = kinds.get(file.name)
        # Other golden data have trajectories too.
        if kind is None or (kind == "trajectory" and "lora" not in json.loads(file.read_text())):
            return None
        return PreferenceCase(file.parent.name, kind, file, self)


FOLDERS = PreferenceFolders


def run_cases(
    golden: PreferenceFolders, cases: Sequence[PreferenceCase], scale: float, dtype: str
) -> Iterator[CaseReport]:
    """One report per case; of a trajectory one for each kind."""
    for case in cases:
        if dtype != "float32":
            yield CaseReport(case.name, scale, unsupported=f"dtype {dtype}: they are for float32")
        elif case.kind == "trajectory":
            yield from _trajectories(golden, case, scale)
        else:
            report = CaseReport(case.name, scale, {})
            _answers(golden, case, report)
            yield report


def loaded(golden: PreferenceFolders, case: PreferenceCase) -> Any:
    """The policy of a case."""
    folder = golden.models[case.meta.get("model", "dense_untied")]
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    if case.name.startswith("lora"):
        model.load_adapter(_beside(case, "adapter"))
    return model


def _beside(case: PreferenceCase, name: str) -> Path:
    return case.file.parents[1] / name


def reference_of(
    golden: PreferenceFolders, case: PreferenceCase, model: Any, has_delta: bool = True
) -> Reference:
    """The reference of a case: the model on disk with the tensors of a delta, or no adapter."""
    name = case.meta.get("model", "dense_untied")
    delta = None
    if has_delta and model.adapter is None:
        delta = _beside(case, f"reference_delta.{name}.safetensors")
    return Reference(delta_values(model, golden.models[name], delta), MasterWeights([]))


def delta_values(model: Any, folder: Path, delta: Path | None) -> Iterator[Any]:
    """Each trained parameter with its value on disk, or in a file of some; of an adapter 0."""
    stored: dict[str, Any] = {**checkpoint_tensors(folder)}
    if delta is not None:
        stored |= {key: StoredArray(values) for key, values in load_file(delta).items()}
    stored = model.checkpoint_map.tensors_as_here(stored, model.config)
    for items in by_parameter(model.stored_parameters()):
        parameter = items[0].parameter
        if is_low_rank(items[0].key):
            yield parameter, 0 * parameter
        elif not parameter.stop_gradient:
            yield parameter, stored_value(items, stored)


def batch_of(
    model: Any,
    case: PreferenceCase,
    settings: PreferenceConfig,
    is_packed: bool = False,
    aux: float | None = None,
) -> Any:
    """The case's inputs as the package's own batch, counted for the loss of `runner_of`."""
    tensors, is_paired = case.tensors, "pairs" in case.meta
    rows, labels = tensors["in.input_ids"], case.meta.get("labels", [])
    merge = model.config.vision_config.spatial_merge_size
    grids = tensors.get("in.image_grid_thw", np.zeros([0, 3], np.int64))
    pixels = tensors.get("in.pixel_values")
    taken = taken_patches = 0
    answers = []
    shared = is_paired and case.meta["images_of_rejected"] != "own"
    for number in range(len(rows)):
        real = tensors["in.attention_mask"][number] == 1
        ids = rows[number][real]
        learned = tensors["in.completion_mask"][number][real] == 1
        answer = {"input_ids": ids, "labels": np.where(learned, ids, -100)}
        left = int((ids == model.config.image_token_id).sum())
        own = []
        while left and not (shared and number >= len(rows) // 2):
            own.append(grids[taken])
            left -= int(grids[taken].prod()) // merge**2
            taken += 1
        if own:
            assert pixels is not None
            count = int(np.prod(own, axis=1).sum())
            answer["image_grid_thw"] = np.stack(own)
            answer["pixel_values"] = pixels[taken_patches : taken_patches + count]
            taken_patches += count
        answers.append(answer)
    assert taken == len(grids), "every image is of an answer"
    config = model.config
    collator = PreferenceCollator(
        VLCollator(
            504, config.image_token_id, config.video_token_id, merge,
            lists_real_rows=bool(getattr(config.text_config, "num_experts", 0)),
        ),
        is_packed,
        is_paired,
        settings.has_baseline,
        settings.ld_alpha,
    )  # fmt: skip
    divisors = PreferenceLoss(settings, aux).divisors
    complete = PreparedCollator(collator, config.vision_config, divisors, PreferenceBatch)
    if not is_paired:
        samples = [
            {**answer, "is_chosen": np.asarray(label)}
            for answer, label in zip(answers, labels, strict=True)
        ]
        return complete([samples] if is_packed else samples)
    half = len(answers) // 2
    samples = [
        {
            **{f"chosen.{key}": value for key, value in answers[i].items()},
            **{f"rejected.{key}": value for key, value in answers[half + i].items()},
            "shares_media": np.asarray(shared),
        }
        for i in range(half)
    ]
    return complete([samples] if is_packed else samples)


def runner_of(
    model: Any, settings: PreferenceConfig, reference: Reference | None, aux: float | None = None
) -> ComparingRunner:
    """The runner of a run with these settings."""
    loss = PreferenceLoss(settings, aux)
    adapter = PreferenceAdapter(VLBatchAdapter(), loss)
    own = reference if settings.has_reference else None
    return ComparingRunner(ModelRunner(model, loss, adapter), own, ONE_RANK)


def settings_of(name: str) -> PreferenceConfig:
    return PreferenceConfig(**_SETTINGS.get(name, {"loss_type": [name]}))


def _answers(golden: PreferenceFolders, case: PreferenceCase, report: CaseReport) -> None:
    model = loaded(golden, case)
    reference = reference_of(golden, case, model)
    aux = 0.001 if "aux" in case.name else None
    if aux is not None:
        text = model.config.text_config
        object.__setattr__(text, "output_router_logits", True)
        object.__setattr__(text, "router_aux_loss_coef", aux)
    for name, wanted in case.meta["losses"].items():
        if name in _LEFT_OUT:
            continue
        settings = settings_of(name)
        runner = runner_of(model, settings, reference, aux)
        loss: PreferenceLoss = runner.loss
        batch = batch_of(model, case, settings, aux=aux)
        totals = agree_on_step([batch], loss)
        own = runner.adapter.synchronized(batch, totals.needed[0], model)
        terms = runner.accumulate_gradients([own], totals.counts).numpy().tolist()
        means = dict(zip(loss.terms, terms, strict=True))
        total = sum(weight * means[term] for term, weight in loss.terms.items() if weight)
        slope = np.abs(np.asarray(wanted["dloss_dlogps"] or [1.0])).sum()
        allowed = LOSS * abs(wanted["loss"]) + ANSWER * slope
        report.absolute("loss", name, total, allowed, wanted["loss"])
        _metrics(report, name, means, wanted["metrics"])
        compare_gradients(report, case, name, *gradients(model), model.whole_shapes())
        for _, parameter in model.hf_named_parameters():
            parameter.clear_gradient(False)
    _log_probs(report, case, model, reference)


def _log_probs(report: CaseReport, case: PreferenceCase, model: Any, reference: Reference) -> None:
    """Sums of the policy and of the reference, padded and packed."""
    name = "kto" if "rows" in case.meta else "sigmoid"
    runner = runner_of(model, settings_of(name), reference)
    loss: PreferenceLoss = runner.loss
    for is_packed in (False, True):
        batch = batch_of(model, case, settings_of(name), is_packed)
        batch = runner.adapter.synchronized(batch, [1], model)
        batches = [batch, *loss.other_batches([batch])]
        found = {"policy": runner.values(batches, loss.values)}
        with reference.in_place():
            found["reference"] = runner.values(batches, loss.values)
        for who, values in found.items():
            for key, own in zip((f"{who}.logps", f"{who}.KL_logps"), values, strict=False):
                own_S = own.numpy()
                if "pairs" in case.meta:
                    own_S = np.concatenate([own_S[::2], own_S[1::2]])
                group = "packed" if is_packed else "logps"
                report.absolute(group, key, own_S, ANSWER, case.tensors[key])


def _metrics(
    report: CaseReport, name: str, means: Mapping[str, float], wanted: Mapping[str, float]
) -> None:
    found = {**means, "nll_loss": means.get("sft_loss")}
    found.setdefault("rewards/margins", means["rewards/chosen"] - means["rewards/rejected"])
    for key, value in wanted.items():
        is_other = key == "nll_loss" and name == "orpo_llamafactory"
        if key == "num_tokens" or is_other or (key == "kl" and name == "apo_zero_unpaired"):
            continue
        if key not in found or found[key] is None:
            report.fail("metrics", f"{name} {key}", "it is not reported")
        else:
            report.near("metrics", f"{name} {key}", found[key], LOSS, ANSWER, value)


def compare_gradients(
    report: CaseReport,
    case: Any,
    name: str,
    found: Mapping[str, np.ndarray],
    norm: float,
    shapes: Mapping[str, tuple[int, ...]],
    num_samples: int = _SAMPLES,
    tolerance: float = GRADIENT,
    knows_largest: bool = True,
) -> None:
    """Compare norms, samples and full gradients of a loss of a case.

    Args:
        num_samples: entries that a case has of a larger tensor.
        knows_largest: whether the largest entry is taken as one of these; else it is that of the
            gradient found, as far as the norm allows.
    """
    report.relative("norm", name, norm, tolerance, case.meta["losses"][name]["grad_global_norm"])
    norms, samples = case.samples[f"{name}.norms"], case.samples[f"{name}.samples"]
    own_norms, begin = [], 0
    for number, key in enumerate(case.meta["trainable"]):
        full = case.full.get(f"{name}|{key}")
        here = key.removeprefix(_PREFIX).replace(".default.weight", ".weight")
        grad = found.get(here)
        if grad is None:
            # As the tower's of texts alone: transformers gives zeros.
            grad = np.zeros(shapes[here], np.float32)
        own_norms.append(float(np.linalg.norm(grad.astype(np.float64))))
        if ".mlp.experts." in here:
            # Of transformers' layout, not of the files'.
            grad = grad.swapaxes(-1, -2)
        flat = grad.reshape(-1)
        places = np.arange(flat.size)
        if flat.size > num_samples:
            places = np.arange(num_samples) * (flat.size - 1) // (num_samples - 1)
        wanted = samples[begin : begin + len(places)]
        begin += len(places)
        if norms[number] > 1e-7 * norms.max():
            # Relative to the tensor's largest entry, of which the norm is a bound.
            largest = max(np.abs(wanted).max(), norms[number] / flat.size**0.5)
            if not knows_largest:
                largest = max(largest, min(np.abs(flat).max(), norms[number]))
            report.absolute("grads", f"{name} {key}", flat[places], tolerance * largest, wanted)
            if full is not None:
                report.relative("full", f"{name} {key}", grad, tolerance, full)
    report.absolute("norms", name, own_norms, tolerance * norms.max(), norms)


def _trajectories(
    golden: PreferenceFolders, case: PreferenceCase, scale: float
) -> Iterator[CaseReport]:
    inputs = golden.case("shared_image")
    for name in ("full", "lora"):
        trained = case.meta[name]
        report = CaseReport(f"{case.name}[{name}]", scale)
        model = loaded(golden, inputs)
        if name == "lora":
            model.load_adapter(case.file.with_name("adapter_start"))
        given = trained["settings"]
        config = TrainConfig(
            output_dir="unused",
            learning_rate=given["lr"],
            weight_decay=given["weight_decay"],
            weight_decay_exclude=[],
        )
        reference = reference_of(golden, inputs, model, has_delta=False)
        runner = runner_of(model, settings_of("sigmoid"), reference)
        parameters = [(n, p) for n, p in model.hf_named_parameters() if not p.stop_gradient]
        optimizer = Optimizer(parameters, config, decayed_names(dict(parameters), []))
        batch = batch_of(model, inputs, settings_of("sigmoid"))
        for number, step in enumerate(trained["steps"]):
            outcome = train_step(runner, optimizer, [batch], config.learning_rate)
            means = outcome.means(runner.loss)
            report.absolute("loss", f"step {number}", means["preference_loss"], LOSS, step["loss"])
            norm = step["grad_norm_before_clipping"]
            report.relative("grad_norm", f"step {number}", float(outcome.grad_norm), DRIFT, norm)
            for key in ("rewards/margins", "logps/chosen", "logps/rejected"):
                report.near(key, f"step {number}", means[key], DRIFT, ANSWER, step[key])
        yield report
