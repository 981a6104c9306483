"""Golden cases of learning from rewards: advantages, log-probabilities, losses, metrics and
gradients, and training trajectories from given answers, with the package's own batches, runner,
objective, reference and optimizer.

Tolerances are those of the golden data, for float32: log-probabilities 1e-5 a token (Qwen3.5 6e-5),
losses of given log-probabilities 1e-5 and their derivatives 1e-5 of the largest, losses through the
model 3e-5 (1e-4 of losses that divide by nothing), gradients 5e-5 of the largest entry of a tensor
(Qwen3.5 1e-4), in trajectories losses 5e-5, norms 5e-5, changes 3e-4; shares of clipped ratios are
exact.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
from safetensors.numpy import load_file

from paddle_vl import Qwen3_5ForConditionalGeneration, Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.adapter_files import is_low_rank
from paddle_vl.checkpoint.reading import stored_value
from paddle_vl.checkpoint.rules import by_parameter
from paddle_vl.config.schema import TrainConfig
from paddle_vl.families.vlm.grpo.objective import RolloutAdapter, RolloutLoss
from paddle_vl.families.vlm.grpo.settings import GRPOConfig
from paddle_vl.families.vlm.inputs.collate import PreparedCollator, VLCollator
from paddle_vl.families.vlm.inputs.rollouts import (
    OLD,
    REFERENCE,
    SAMPLER,
    Rollout,
    RolloutBatch,
    RolloutCollator,
)
from paddle_vl.families.vlm.training.objective import VLBatchAdapter
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.train.freeze import decayed_names
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.reference import Reference
from paddle_vl.train.step import ModelRunner, agree_on_step, train_step
from parity.comparison import CaseReport
from parity.grpo_arrays import (
    Tensors,
    from_arrays,
    generation,
    of_accumulation,
    of_advantages,
    of_order,
)
from parity.grpo_golden import (
    GRPOCase,
    GRPOFolders,
    advantages_of,
    compare_metrics,
    is_on_policy,
    loss_of,
    losses_of,
    reads_sampler,
    settings_of,
)
from parity.preference import StoredArray, compare_gradients, delta_values
from parity.recording import gradients, weights

THROUGH_MODEL, NOT_DIVIDED = 3e-5, 1e-4
_STEP_LOSS, _NORM, _CHANGE = 5e-5, 5e-5, 3e-4
_PREFIX, _SAMPLES = "base_model.model.", 16

FOLDERS = GRPOFolders


def run_cases(
    golden: GRPOFolders, cases: Sequence[GRPOCase], scale: float, dtype: str
) -> Iterator[CaseReport]:
    """One report per case; of a trajectory one for each run."""
    of_kind = {"advantages": of_advantages, "accumulation": of_accumulation, "order": of_order}
    for case in cases:
        report = CaseReport(case.name, scale, {})
        if dtype != "float32":
            report.unsupported = f"dtype {dtype}: they are for float32"
        elif case.kind == "trajectory":
            yield from _trajectories(golden, case, scale)
            continue
        elif case.kind == "answers":
            from_arrays(case, report)
            if case.meta["model"] is not None:
                generation(case, report)
                _through_model(golden, case, report)
        else:
            of_kind[case.kind](case, report)
        yield report


# Losses through a model.


def loaded(golden: GRPOFolders, case: GRPOCase) -> Any:
    """The policy of a case."""
    kinds = (Qwen3VLForConditionalGeneration, Qwen3_5ForConditionalGeneration)
    model = kinds[case.is_qwen3_5].from_pretrained(golden.models[case.model])
    if case.is_adapter:
        model.load_adapter(case.beside("adapter"))
    return model


def other_weights(golden: GRPOFolders, case: GRPOCase, model: Any, which: str) -> Reference:
    """The policy that answered (`old`) or the reference."""
    if case.is_adapter and which == "old":
        file = load_file(case.beside("adapter_old.safetensors"))
        stored = {key.removeprefix(_PREFIX): StoredArray(value) for key, value in file.items()}
        values = [
            (items[0].parameter, stored_value(items, stored))
            for items in by_parameter(model.stored_parameters())
            if is_low_rank(items[0].key)
        ]
        return Reference(values, MasterWeights([]))
    delta = None if case.is_adapter else case.beside(f"{which}_delta.{case.model}.safetensors")
    return Reference(delta_values(model, golden.models[case.model], delta), MasterWeights([]))


def rollouts_of(case: GRPOCase, name: str, logps: Mapping[str, np.ndarray]) -> list[Rollout]:
    """The rows of a case.

    Args:
        logps: `[S, T]` by the field of a batch.
    """
    tensors, size = case.tensors, case.meta["num_generations"]
    grids, pixels = tensors.get("in.image_grid_thw"), tensors.get("in.pixel_values")
    advantages_S = advantages_of(case, name)
    per_prompt = tensors.get("in.images_per_prompt")
    found: list[Rollout] = []
    taken = taken_patches = 0
    prompt: dict[str, np.ndarray] = {}
    for row, ids_L in enumerate(tensors["in.input_ids"]):
        start = int(tensors["in.prompt_lengths"][row])
        length = int(tensors["in.completion_lengths"][row])
        if row % size == 0:
            prompt = {"input_ids": ids_L[:start]}
            count = 0 if per_prompt is None else int(per_prompt[row // size])
            if count:
                assert grids is not None
                assert pixels is not None
                own = grids[taken : taken + count]
                patches = int(own.prod(axis=1).sum())
                prompt |= {"image_grid_thw": own}
                prompt |= {"pixel_values": pixels[taken_patches : taken_patches + patches]}
                taken, taken_patches = taken + count, taken_patches + patches
        learned = tensors["loss_mask"][row, :length]
        log_probs = {key: values[row, :length] for key, values in logps.items()}
        ids_C = ids_L[start : start + length]
        found.append(Rollout(prompt, ids_C, float(advantages_S[row]), learned, log_probs))
    return found


def collator_of(model: Any, loss: RolloutLoss) -> PreparedCollator:
    """Makes batches of rollouts for a loss."""
    config, settings = model.config, loss.settings
    inner = VLCollator(
        504, config.image_token_id, config.video_token_id,
        config.vision_config.spatial_merge_size,
        lists_real_rows=bool(getattr(config.text_config, "num_experts", 0)),
    )  # fmt: skip
    own = RolloutCollator(
        inner,
        temperature=settings.temperature,
        max_completion_length=settings.max_completion_length,
    )
    return PreparedCollator(own, config.vision_config, loss.divisors, RolloutBatch)


def runner_of(model: Any, loss: RolloutLoss) -> ModelRunner:
    return ModelRunner(model, loss, RolloutAdapter(VLBatchAdapter(), loss))


def _through_model(golden: GRPOFolders, case: GRPOCase, report: CaseReport) -> None:
    model, tensors = loaded(golden, case), case.tensors
    mask_ST = tensors["loss_mask"] == 1
    aux = 0.001 if "aux" in case.name else None
    if aux is not None:
        text = model.config.text_config
        object.__setattr__(text, "output_router_logits", True)
        object.__setattr__(text, "router_aux_loss_coef", aux)
    plain = RolloutLoss(settings_of("dapo", {}, case.meta))
    batch: Any = collator_of(model, plain)(rollouts_of(case, "dapo", {}))
    runner = runner_of(model, plain)
    # Of logits, which the temperature divides.
    of_token = (6e-5 if case.is_qwen3_5 else 1e-5) / plain.settings.temperature

    def log_probs(who: str) -> np.ndarray:
        found_N = runner.values([batch], plain.values)[0].numpy()
        stored = tensors[f"{who}.per_token_logps"][mask_ST]
        report.absolute("logps", who, found_N, of_token, stored)
        found_ST = np.zeros(mask_ST.shape, np.float32)
        found_ST[mask_ST] = found_N
        return found_ST

    log_probs("policy")
    entropy_N = runner.values([batch], lambda output: output.answers.entropy)[0].numpy()
    wanted_N = tensors["policy.per_token_entropy"][mask_ST]
    report.absolute("entropy", "policy", entropy_N, of_token, wanted_N)
    found = {SAMPLER: tensors["sampler.per_token_logps"]}
    for key, which in ((OLD, "old"), (REFERENCE, "reference")):
        with other_weights(golden, case, model, which).in_place():
            found[key] = log_probs(which)
    for name, wanted, settings in losses_of(case):
        loss = RolloutLoss(settings, aux)
        given = {SAMPLER: found[SAMPLER]} if reads_sampler(name, settings) else {}
        given |= {} if is_on_policy(wanted) else {OLD: found[OLD]}
        given |= {REFERENCE: found[REFERENCE]} if settings.has_reference else {}
        runner = runner_of(model, loss)
        batch = collator_of(model, loss)(rollouts_of(case, name, given))
        totals = agree_on_step([batch], loss)
        terms = runner.accumulate_gradients([batch], totals.counts)
        total, means = loss_of(loss, terms)
        divides = not name.startswith(("luspo", "rloo", "verl_seq_mean_token_sum"))
        allowed = (THROUGH_MODEL if divides else NOT_DIVIDED) * max(1, abs(wanted["loss"]))
        report.absolute("loss", name, total, allowed, wanted["loss"])
        compare_metrics(report, name, means, wanted["metrics"], of_token + THROUGH_MODEL)
        if aux is not None:
            stored = wanted["metrics"]["aux_loss"]
            report.relative("metrics", f"{name} aux_loss", means["aux_loss"], THROUGH_MODEL, stored)
        if f"{name}.norms" in case.samples:
            tolerance = 1e-4 if case.is_qwen3_5 else 5e-5
            compare_gradients(
                report,
                case,
                name,
                *gradients(model),
                model.whole_shapes(),
                _SAMPLES,
                tolerance,
                False,
            )
        for _, parameter in model.hf_named_parameters():
            parameter.clear_gradient(False)


# Trajectories.


def _trajectories(golden: GRPOFolders, case: GRPOCase, scale: float) -> Iterator[CaseReport]:
    pixels = load_file(case.file.with_name("pixels.safetensors"))
    for name, run in case.meta["runs"].items():
        report = CaseReport(f"{case.name}[{name}]", scale)
        _trajectory(golden, case, name, run, _prompts(case, pixels), report)
        yield report


def _prompts(case: GRPOCase, pixels: Tensors) -> list[dict[str, np.ndarray]]:
    (values,) = pixels.values()
    found, taken = [], 0
    for each in case.meta["prompts"]:
        prompt = {"input_ids": np.asarray(each["ids"], np.int64)}
        if each["grids"]:
            grids = np.asarray(each["grids"], np.int64)
            patches = int(grids.prod(axis=1).sum())
            own = values[taken : taken + patches]
            prompt |= {"image_grid_thw": grids, "pixel_values": own}
            taken += patches
        found.append(prompt)
    return found


def _trajectory(
    golden: GRPOFolders,
    case: GRPOCase,
    name: str,
    run: Mapping[str, Any],
    prompts: Sequence[Mapping[str, np.ndarray]],
    report: CaseReport,
) -> None:
    given = run["settings"]
    own = {key: value for key, value in given.items() if key in GRPOConfig.model_fields}
    settings = GRPOConfig(**own, kl_clamp=None)
    model = Qwen3VLForConditionalGeneration.from_pretrained(golden.models["dense_untied"])
    if name.startswith("lora"):
        model.load_adapter(case.file.with_name("adapter_start"))
    config = TrainConfig(
        output_dir="unused", learning_rate=given["learning_rate"], weight_decay=0.0,
        weight_decay_exclude=[], adam_beta1=given["adam_beta1"], adam_beta2=given["adam_beta2"],
        adam_epsilon=given["adam_epsilon"], max_grad_norm=1.0,
    )  # fmt: skip
    parameters = [(n, p) for n, p in model.hf_named_parameters() if not p.stop_gradient]
    begun = weights(model)
    optimizer = Optimizer(parameters, config, decayed_names(dict(parameters), []))
    loss = RolloutLoss(settings)
    runner, collator = runner_of(model, loss), collator_of(model, loss)
    start = delta_values(model, golden.models["dense_untied"], None)
    reference = Reference(start, MasterWeights([])) if settings.has_reference else None
    accumulation = given["gradient_accumulation_steps"]
    window = given["steps_per_generation"] * given["num_iterations"] // accumulation
    batches: dict[tuple[int, ...], Any] = {}
    average = 0.0
    for number, step in enumerate(run["steps"]):
        if number % window == 0:
            of_window = run["steps"][number : number + window]
            round_ = run["rounds"][number // window]
            batches = _window(case, round_, of_window, prompts, collator, runner, reference)
            tokens = sum(int(batch.num_target_tokens) for batch in batches.values())
            average = tokens * accumulation / given["steps_per_generation"]
        own_batches = [batches[tuple(each["rows"])] for each in step["micro_batches"]]
        totals = agree_on_step(own_batches, loss)
        # TRL divides by the mean number of tokens of a generation's updates.
        counts: list[Any] = list(totals.counts)
        if loss.divisors[0] == "num_target_tokens":
            counts[0] = average
        totals = replace(totals, counts=tuple(counts))
        with paddle.no_grad():
            for batch, wanted in zip(own_batches, step["micro_batches"], strict=True):
                sums = dict(zip(loss.terms, runner.loss_sums([batch]).numpy(), strict=True))
                label = f"step {step['step']} {wanted['rows']}"
                found = sums["policy_loss"] / counts[0]
                report.absolute("loss", label, found, _STEP_LOSS, wanted["loss"])
                own_counts = dict(zip(loss.terms, batch.counts, strict=True))
                means = {n: float(value) / max(1, own_counts[n]) for n, value in sums.items()}
                rest = {k: v for k, v in wanted.items() if k not in ("rows", "loss")}
                compare_metrics(report, label, means, rest, _STEP_LOSS)
        outcome = train_step(runner, optimizer, own_batches, config.learning_rate, totals=totals)
        norm = step["grad_norm_before_clipping"]
        label, found = f"step {step['step']}", float(outcome.grad_norm)
        if norm:
            report.relative("grad_norm", label, found, _NORM, norm)
        else:
            report.absolute("grad_norm", label, found, 0.0, norm)
    ends = weights(model)
    for key, stored in run.get("norm_of_change", {}).items():
        change = ends[key].astype(np.float64) - begun[key]
        report.relative("change", key, np.linalg.norm(change), _CHANGE, stored)
    for key, stored in run.get("norm_at_the_end", {}).items():
        here = key.replace(".default.weight", ".weight")
        report.relative("end", key, np.linalg.norm(ends[here]), _CHANGE, stored)


def _window(
    case: GRPOCase,
    round_: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    prompts: Sequence[Mapping[str, np.ndarray]],
    collator: PreparedCollator,
    runner: ModelRunner,
    reference: Reference | None,
) -> dict[tuple[int, ...], Any]:
    """The micro-batches of a round by their rows, with the log-probabilities of its start."""
    completions = case.meta["completions"][round_["completions_round"]]
    copies: dict[int, int] = {}
    rollouts = []
    for prompt, advantage in zip(round_["prompts"], round_["advantages"], strict=True):
        copy = copies[prompt] = copies.get(prompt, -1) + 1
        ids_C = np.asarray(completions[prompt][copy], np.int64)
        rollouts.append(Rollout(prompts[prompt], ids_C, advantage))
    rows = {tuple(each["rows"]): None for step in steps for each in step["micro_batches"]}
    batches: list[Any] = [collator([rollouts[row] for row in each]) for each in rows]
    loss: Any = runner.loss
    old = runner.values(batches, loss.values)
    found = [batch | {OLD: own} for batch, own in zip(batches, old, strict=True)]
    if reference is not None:
        with reference.in_place():
            found = loss.compared(found, runner.values(found, loss.values), [], None)
    return dict(zip(rows, found, strict=True))
