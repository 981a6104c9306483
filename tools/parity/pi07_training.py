"""The low-level model of pi07: training step, sampling and a few updates, compared tensor by
tensor.
"""

import numpy as np
import paddle

from paddle_vl.checkpoint.writing import parameter_array
from paddle_vl.config.schema import TrainConfig
from paddle_vl.families.pi07.checkpoint_map import UNUSED_KEYS
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching, flow_counts
from paddle_vl.families.pi07.policy_model import as_tensors
from paddle_vl.families.pi07.prefix_layout import Presence, presence_of
from paddle_vl.train.optimizer import Optimizer
from parity.comparison import CaseReport
from parity.pi07_golden import GoldenCase, model_of
from parity.pi07_quantities import (
    Comparison,
    array,
    cache_quantities,
    prefix_quantities,
    recorded,
    samples_of,
    suffix_quantities,
)

# Adam divides a gradient by its magnitude, so rounding errors move weights by full steps: two
# settings of Paddle's own kernels differ by 1e-4 after six steps.
DRIFT = 5e-4
_NOT_FOR_SAMPLING = {
    "actions", "time", "discrete_actions", "discrete_action_masks", "actions_is_pad",
    "real_action_dim", "delay", "noise", "action_prefix",
}  # fmt: skip


def run_training(case: GoldenCase, report: CaseReport) -> None:
    """Losses and gradients with both streams in one pass, then in two passes."""
    model, batch, compare = model_of(case), case.inputs(), Comparison(case, report)
    model.train()
    presence = presence_of(batch)
    if "forced_gates" in case.name:
        # As if other ranks had all optional fields.
        presence = Presence(True, True, True)
    with recorded(model) as recording:
        losses = model(batch, presence, per_sample=True)
    calls, batch = recording.calls, as_tensors(batch)
    (prefix,), (output,) = calls["prefix"], calls["decoder"]
    noisy = model.noisy_actions(batch)
    suffix_rows, cond = calls["suffix"][0]
    compare.check("prefix", prefix_quantities(prefix, calls["tokens"][0], case.meta["n_cams"]))
    masks = suffix_quantities(prefix, noisy.x_t.shape[1])
    compare.check("suffix", {f"out.suffix.{name}": value for name, value in masks.items()})
    inputs = {"x_t": noisy.x_t, "time_bc": noisy.time, "embs": suffix_rows, "adarms_cond": cond}
    compare.check("suffix", {f"out.suffix.{name}": array(x) for name, x in inputs.items()})
    whole, number = _all_rows(model, prefix, suffix_rows, cond), len(model.decoder.layers)
    for i in range(number):
        (rows,) = calls[f"layer{i}"]
        prefix_out, suffix_out = (samples_of(x, len(suffix_rows)) for x in rows)
        if i == number - 1:
            # Training outputs only the rows that predict action tokens.
            prefix_out = samples_of(whole[f"layer{i}"][0][0], len(suffix_rows))
        compare.check("layers", {f"out.prefix.layer{i}": prefix_out})
        compare.check("layers", {f"out.suffix.layer{i}": suffix_out})
    compare.check("layers", {"out.prefix.final": array(whole["decoder"][0].prefix)})
    compare.check("layers", {"out.suffix.final": array(output.suffix)})
    compare.check("loss", _loss_quantities(model, batch, noisy, calls, losses))
    _compare_two_passes(model, prefix, suffix_rows, cond, compare)
    compare.all_compared()
    weights = case.meta.get("loss_weighting", {"MSE": 1, "CE": 1})
    paddle.add_n([losses[name] * weight for name, weight in weights.items()]).backward()
    _compare_gradients(model, case, compare)


@paddle.no_grad()
def _all_rows(model, prefix, suffix_rows, cond) -> dict[str, list]:
    """Outputs of the layers with all rows of the prefix."""
    views = model.prefix_view(prefix), model.suffix_view(prefix)
    with recorded(model) as recording:
        model.decoder(prefix.embs, suffix_rows, cond, *views)
    return recording.calls


def _loss_quantities(model, batch, noisy, calls, losses) -> dict[str, np.ndarray]:
    velocity = calls["velocity"][0].astype("float32")
    logits = calls["logits"][0].astype("float32")
    tokens, masks = batch["discrete_actions"], batch["discrete_action_masks"]
    per_token = paddle.nn.functional.cross_entropy(logits, tokens, reduction="none").squeeze(-1)
    counts = flow_counts(
        noisy.is_delayed,
        velocity.shape[-1],
        batch.get("actions_is_pad"),
        batch.get("real_action_dim"),
    )
    found = {
        "out.fm.u_t": noisy.velocity,
        "out.fm.v_t": velocity,
        "out.fm.sq_err": (noisy.velocity - velocity).square(),
        "out.fm.loss_mask": counts,
        "out.fm.delay_prefix_mask": noisy.is_delayed,
        "out.ce.logits": logits,
        "out.ce.per_token_masked": per_token * masks.astype("float32"),
        "out.ce.valid": masks,
        "out.MSE": losses["MSE"],
        "out.CE": losses["CE"],
        "out.total": losses["MSE"] + losses["CE"],
    }
    for name in ("MSE_per_sample", "CE_per_sample"):
        found[f"out.{name}.sum"], found[f"out.{name}.count"] = losses[name]
    return {name: array(value) for name, value in found.items()}


def _compare_two_passes(model, prefix, suffix_rows, cond, compare: Comparison) -> None:
    """The prefix first, then the suffix on its cached keys and values."""
    with paddle.no_grad():
        first = model.decoder(prefix.embs, prefix_view=model.prefix_view(prefix), keep=True)
        second = model.decoder(
            None, suffix_rows, cond, suffix_view=model.suffix_view(prefix), cache=first.cache
        )
    compare.check("cache", cache_quantities(first.cache, prefix.num_seen))
    compare.check("two passes", {"out.prefix.final": array(first.prefix)})
    compare.check("two passes", {"out.suffix.final": array(second.suffix)})


def _compare_gradients(
    model: PI07LowLevelFlowMatching, case: GoldenCase, compare: Comparison
) -> None:
    """Compare every gradient, and the set of parameters without a gradient."""
    report, without, squares = compare.report, set(UNUSED_KEYS), 0.0
    holds_gradients = any(name.startswith("grad.") for name in case.tensors)
    for item in model.stored_parameters():
        if item.parameter.grad is None:
            without.add(item.key)
            continue
        found = item.layout.to_stored(item.of_own(array(item.parameter.grad)))
        squares += float(np.square(found, dtype=np.float64).sum())
        compare.check("grads", {f"grad.{item.key}": found})
        if holds_gradients and f"grad.{item.key}" not in compare.compared:
            report.fail("grads", item.key, "has a gradient, none in the case")
    compare.all_compared("grad.")
    wanted = set(case.meta["params_without_grad"]) | UNUSED_KEYS
    if without != wanted:
        report.fail("grads", "params_without_grad", f"differ in {sorted(without ^ wanted)[:5]}")
    frozen = {item.key for item in model.stored_parameters() if item.parameter.stop_gradient}
    wanted = set(case.meta["params_requires_grad_false"]) - UNUSED_KEYS
    if frozen != wanted:
        report.fail("grads", "frozen parameters", f"differ in {sorted(frozen ^ wanted)[:5]}")
    if "grad_l2_norm" in case.meta.get("scalars", {}):
        norm = np.asarray(case.meta["scalars"]["grad_l2_norm"], dtype=np.float64)
        compare.value("grads", "global norm", squares**0.5, norm)


def run_sampling(case: GoldenCase, report: CaseReport) -> None:
    """Sampling with cached keys and values: prefix, cache, every Euler step, actions."""
    model, inputs, compare = model_of(case), case.inputs(), Comparison(case, report)
    model.eval()
    batch = {name: value for name, value in inputs.items() if name not in _NOT_FOR_SAMPLING}
    # Inputs of a training case have a delay per sample, which sampling does not use.
    delay = int(inputs["delay"]) if "action_prefix" in inputs else 0
    steps = case.meta["num_denoise_steps"]
    with recorded(model) as recording:
        actions = model.sample_actions(
            batch, inputs["noise"], delay, inputs.get("action_prefix"), num_steps=steps
        )
    calls = recording.calls
    (prefix,) = calls["prefix"]
    passes = calls["decoder"]
    if len(passes) != steps + 1:
        report.fail("steps", "number of steps", f"{len(passes) - 1} were made, golden {steps}")
        return
    compare.check("prefix", prefix_quantities(prefix, calls["tokens"][0], case.meta["n_cams"]))
    compare.check("layers", {"out.prefix.final": array(passes[0].prefix)})
    compare.check("cache", cache_quantities(passes[0].cache, prefix.num_seen))
    for i in range(len(model.decoder.layers)):
        rows = calls[f"layer{i}"]
        prefix_rows, suffix_rows = (samples_of(x[0], len(actions)) for x in rows[:2])
        compare.check("layers", {f"out.prefix.layer{i}": prefix_rows})
        compare.check("layers", {f"out.step0.suffix.layer{i}": suffix_rows})
    masks = suffix_quantities(prefix, actions.shape[1])
    compare.check("steps", {f"out.step0.suffix.{name}": value for name, value in masks.items()})
    is_known_C = (paddle.arange(actions.shape[1]) < delay).astype("int64")
    for n in range(steps):
        x_t, time_2 = calls["suffix input"][n][:2]
        rows, cond_2E = calls["suffix"][n]
        # A step has two times: that of the free actions, and 0 of the known ones.
        time, cond = (x[is_known_C].unsqueeze(0) for x in (time_2, cond_2E))
        values = {"x_t": x_t, "time_bc": time, "embs": rows, "adarms_cond": cond}
        values["final"] = passes[n + 1].suffix
        found = {f"out.step{n}.suffix.{name}": array(value) for name, value in values.items()}
        found[f"out.step{n}.v_t"] = array(calls["velocity"][n].astype(paddle.float32))
        compare.check("steps", found)
    compare.check("actions", {"out.actions": array(actions)})
    compare.all_compared()


def run_trajectory(case: GoldenCase, report: CaseReport) -> None:
    """AdamW on one batch: losses and gradient norm of every step, and the final weights."""
    settings = _adamw_settings(case.meta)
    beta1, beta2 = settings.get("betas", (0.9, 0.95))
    clip = case.meta.get("clip") or 0.0
    train = TrainConfig(
        output_dir="unused",
        learning_rate=settings["lr"],
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_epsilon=settings.get("eps", 1e-8),
        weight_decay=settings.get("weight_decay", 1e-10),
        max_grad_norm=clip,
    )
    source = case.folders.case("01_")
    described = case if "config" in case.meta else source
    model = model_of(described, case.meta.get("weights_file") or source.meta["weights_file"])
    model.train()
    batch = case.inputs() if "in.actions" in case.tensors else source.inputs()
    trained = [(i.key, i.parameter) for i in model.stored_parameters() if _trains(i)]
    optimizer = Optimizer(trained, train, {name for name, _ in trained})
    found: dict[str, list[float]] = {"MSE": [], "CE": [], "grad_norm": []}
    for _ in range(len(case.tensors["out.MSE"])):
        losses = model(batch)
        (losses["MSE"] + losses["CE"]).backward()
        norm = float(optimizer.squared_norm().sqrt())
        optimizer.clip_gradients(norm)
        optimizer.step(train.learning_rate)
        optimizer.clear_gradients()
        for name, value in (("MSE", losses["MSE"]), ("CE", losses["CE"]), ("grad_norm", norm)):
            found[name].append(float(value))
    compare = Comparison(case, report)
    for name, values in found.items():
        compare.compared.add(f"out.{name}")
        report.relative("steps", f"out.{name}", values, case.tensors[f"out.{name}"], DRIFT)
    for item in model.stored_parameters():
        name = f"out.final_weight.{item.key}"
        if name in case.tensors:
            compare.compared.add(name)
            wanted = case.tensors[name]
            away = np.linalg.norm(parameter_array(item) - wanted)
            # Adam takes full steps along gradients that are pure rounding error: biases of vision
            # keys.
            is_rounding = item.key.endswith("k_proj.bias")
            steps = len(found["MSE"]) * train.learning_rate * 2 * wanted.size**0.5
            limit = steps if is_rounding else DRIFT * np.linalg.norm(wanted)
            report.absolute("weights", name, away / max(limit, 1e-30) * DRIFT, 0.0, DRIFT)
    for key in UNUSED_KEYS:
        compare.compared.add(f"out.final_weight.{key}")
    compare.all_compared()


def _adamw_settings(meta: dict) -> dict:
    """The case's optimizer settings; OpenTau's defaults for the others."""
    given = [value for value in (meta, *meta.values()) if isinstance(value, dict) and "lr" in value]
    return {"lr": 2.5e-5} | (given[0] if given else {})


def _trains(item) -> bool:
    return not item.parameter.stop_gradient
