"""pi07's low-level model and planner: training step, sampling, decoding and a few updates, compared
tensor by tensor.
"""

from typing import Any

import numpy as np
import paddle

from paddle_vl.checkpoint.reading import fill_parameters
from paddle_vl.checkpoint.safetensors_io import read_header
from paddle_vl.checkpoint.writing import parameter_array
from paddle_vl.families.pi07.checkpoint_map import UNUSED_KEYS, engine_keys
from paddle_vl.families.pi07.config import PI07PlannerConfig
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching, as_tensors, flow_counts
from paddle_vl.families.pi07.planner import PI07HighLevelPlannerModel
from paddle_vl.families.pi07.prefix import PLANNER_LABELS, Presence, presence_of
from paddle_vl.train.optimizer import Optimizer
from parity.golden import PI07Case
from parity.pi07_golden import (
    Comparison,
    adamw,
    cache_quantities,
    camera_tokens,
    model_of,
    prefix_quantities,
    recorded,
    samples_of,
    suffix_quantities,
)
from parity.recording import gradients

# Adam divides a gradient by its magnitude, so rounding errors move weights by full steps: two
# settings of Paddle's own kernels differ by 1e-4 after six steps.
DRIFT = 5e-4
_NOT_FOR_SAMPLING = {
    "actions", "time", "discrete_actions", "discrete_action_masks", "actions_is_pad",
    "real_action_dim", "delay", "noise", "action_prefix",
}  # fmt: skip
_PLANNER_TEXTS = ("lang", "metadata", "memory", "response")
_PLANNER_SETTINGS = (
    "prompt_max_length",
    "metadata_max_length",
    "memory_max_length",
    "response_max_length",
    "attention_implementation",
)


def run_training(case: PI07Case, compare: Comparison) -> None:
    """Losses and gradients with both streams in one pass, then in two passes."""
    model, batch = model_of(case), case.inputs()
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
    compare.check("prefix", prefix_quantities(prefix))
    compare.check("prefix", camera_tokens(prefix, calls["tokens"][0], case.meta["n_cams"]))
    masks = suffix_quantities(prefix, noisy.x_t.shape[1])
    inputs = {"x_t": noisy.x_t, "time_bc": noisy.time, "embs": suffix_rows, "adarms_cond": cond}
    compare.check("suffix", masks | inputs, "out.suffix.")
    whole, number = _all_rows(model, prefix, suffix_rows, cond), len(model.decoder.layers)
    for i in range(number):
        (rows,) = calls[f"layer{i}"]
        prefix_out, suffix_out = (samples_of(x, len(suffix_rows)) for x in rows)
        if i == number - 1:
            # Training outputs only the rows that predict action tokens.
            prefix_out = samples_of(whole[f"layer{i}"][0][0], len(suffix_rows))
        compare.check("layers", {f"prefix.layer{i}": prefix_out}, "out.")
        compare.check("layers", {f"suffix.layer{i}": suffix_out}, "out.")
    ends = {"prefix.final": whole["decoder"][0].prefix, "suffix.final": output.suffix}
    compare.check("layers", ends, "out.")
    compare.check("loss", _loss_quantities(model, batch, noisy, calls, losses), "out.")
    _compare_two_passes(model, prefix, suffix_rows, cond, compare)
    compare.all_compared("out.")
    weights = case.meta.get("loss_weighting", {"MSE": 1, "CE": 1})
    paddle.add_n([losses[name] * weight for name, weight in weights.items()]).backward()
    _compare_gradients(model, case, compare)


@paddle.no_grad()
def _all_rows(model, prefix, suffix_rows, cond) -> dict[str, list]:
    """Outputs of the layers with all rows of the prefix."""
    views = model.prefix_view(prefix), model.suffix_view(prefix.pad_masks[:, : prefix.num_seen])
    with recorded(model) as recording:
        model.decoder(prefix.embs, suffix_rows, cond, *views)
    return recording.calls


def _loss_quantities(model, batch, noisy, calls, losses) -> dict[str, Any]:
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
        "fm.u_t": noisy.velocity,
        "fm.v_t": velocity,
        "fm.sq_err": (noisy.velocity - velocity).square(),
        "fm.loss_mask": counts,
        "fm.delay_prefix_mask": noisy.is_delayed,
        "ce.logits": logits,
        "ce.per_token_masked": per_token * masks.astype("float32"),
        "ce.valid": masks,
        "MSE": losses["MSE"],
        "CE": losses["CE"],
        "total": losses["MSE"] + losses["CE"],
    }
    for name in ("MSE_per_sample", "CE_per_sample"):
        found[f"{name}.sum"], found[f"{name}.count"] = losses[name]
    return found


def _compare_two_passes(model, prefix, suffix_rows, cond, compare: Comparison) -> None:
    """The prefix first, then the suffix on its cached keys and values."""
    with paddle.no_grad():
        first = model.decoder(prefix.embs, prefix_view=model.prefix_view(prefix), keep=True)
        view = model.suffix_view(prefix.pad_masks[:, : prefix.num_seen])
        second = model.decoder(None, suffix_rows, cond, suffix_view=view, cache=first.cache)
    compare.check("cache", cache_quantities(first.cache, prefix.num_seen))
    ends = {"prefix.final": first.prefix, "suffix.final": second.suffix}
    compare.check("two passes", ends, "out.")


def _compare_gradients(
    model: PI07LowLevelFlowMatching, case: PI07Case, compare: Comparison
) -> None:
    """Compare every gradient, and the sets of parameters without a gradient and of frozen ones."""
    found, norm = gradients(model)
    placed = model.stored_parameters()
    compare.check("grads", found, "grad.")
    if any(name.startswith("grad.") for name in case.tensors):
        for key in found:
            if f"grad.{key}" not in compare.compared:
                compare.fail("grads", key, "has a gradient, none in the case")
    compare.all_compared("grad.")
    without = {item.key for item in placed} - set(found) | UNUSED_KEYS
    wanted = set(case.meta["params_without_grad"]) | UNUSED_KEYS
    if without != wanted:
        compare.fail("grads", "params_without_grad", f"differ in {sorted(without ^ wanted)[:5]}")
    frozen = {item.key for item in placed if item.parameter.stop_gradient}
    wanted = set(case.meta["params_requires_grad_false"]) - UNUSED_KEYS
    if frozen != wanted:
        compare.fail("grads", "frozen parameters", f"differ in {sorted(frozen ^ wanted)[:5]}")
    if "grad_l2_norm" in case.meta.get("scalars", {}):
        wanted_norm = np.asarray(case.meta["scalars"]["grad_l2_norm"], dtype=np.float64)
        compare.value("grads", "global norm", norm, wanted_norm)


def run_sampling(case: PI07Case, compare: Comparison) -> None:
    """Sampling with cached keys and values: prefix, cache, every Euler step, actions."""
    model, inputs = model_of(case), case.inputs()
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
        compare.fail("steps", "number of steps", f"{len(passes) - 1} were made, golden {steps}")
        return
    compare.check("prefix", prefix_quantities(prefix))
    compare.check("prefix", camera_tokens(prefix, calls["tokens"][0], case.meta["n_cams"]))
    compare.check("layers", {"out.prefix.final": passes[0].prefix})
    compare.check("cache", cache_quantities(passes[0].cache, prefix.num_seen))
    for i in range(len(model.decoder.layers)):
        rows = calls[f"layer{i}"]
        prefix_rows, suffix_rows = (samples_of(x[0], len(actions)) for x in rows[:2])
        compare.check("layers", {f"out.prefix.layer{i}": prefix_rows})
        compare.check("layers", {f"out.step0.suffix.layer{i}": suffix_rows})
    masks = suffix_quantities(prefix, actions.shape[1])
    compare.check("steps", masks, "out.step0.suffix.")
    is_known_C = (paddle.arange(actions.shape[1]) < delay).astype("int64")
    for n in range(steps):
        x_t, time_2 = calls["suffix input"][n][:2]
        rows, cond_2E = calls["suffix"][n]
        # A step has two times: that of the free actions, and 0 of the known ones.
        time, cond = (x[is_known_C].unsqueeze(0) for x in (time_2, cond_2E))
        values = {"x_t": x_t, "time_bc": time, "embs": rows, "adarms_cond": cond}
        values["final"] = passes[n + 1].suffix
        compare.check("steps", values, f"out.step{n}.suffix.")
        velocity = calls["velocity"][n].astype(paddle.float32)
        compare.check("steps", {f"out.step{n}.v_t": velocity})
    compare.check("actions", {"out.actions": actions})
    compare.all_compared("out.")


def run_trajectory(case: PI07Case, compare: Comparison) -> None:
    """AdamW on one batch: losses and gradient norm of every step, and the final weights."""
    meta = case.meta
    given = [value for value in (meta, *meta.values()) if isinstance(value, dict) and "lr" in value]
    train = adamw(given[0] if given else {}, meta.get("clip") or 0.0)
    source = case.folders.case("01_")
    described = case if "config" in meta else source
    model = model_of(described, meta.get("weights_file") or source.meta["weights_file"])
    model.train()
    batch = case.inputs() if "in.actions" in case.tensors else source.inputs()
    placed = model.stored_parameters()
    trained = [(i.key, i.parameter) for i in placed if not i.parameter.stop_gradient]
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
    for name, values in found.items():
        compare.relative("steps", f"out.{name}", values, DRIFT)
    for item in model.stored_parameters():
        name = f"out.final_weight.{item.key}"
        if name in case.tensors:
            wanted = case.tensors[name]
            away = np.linalg.norm(parameter_array(item) - wanted)
            # Adam takes full steps along gradients that are pure rounding error: biases of vision
            # keys.
            is_rounding = item.key.endswith("k_proj.bias")
            steps = len(found["MSE"]) * train.learning_rate * 2 * wanted.size**0.5
            limit = steps if is_rounding else DRIFT * np.linalg.norm(wanted)
            compare.absolute("weights", name, away / max(limit, 1e-30) * DRIFT, DRIFT, 0.0)
    compare.compared |= {f"out.final_weight.{key}" for key in UNUSED_KEYS}
    compare.all_compared("out.")


def run_planner(case: PI07Case, compare: Comparison) -> None:
    """The planner: embedded prefix, losses, decoded tokens, and gradients if the case has any."""
    batch = _planner_batch(case)
    model = _planner(case, batch)
    tensors = as_tensors(batch)
    presence = Presence(False, presence_of(batch).metadata, False)
    assert model.prefix is not None, "a full model has all layers"
    compare.check("prefix", prefix_quantities(model.prefix(tensors, presence, training=True)))
    losses = model(batch)
    compare.check("loss", losses, "out.")
    if any(name.startswith("grad.") for name in case.tensors):
        losses["CE"].backward()
        compare.check("grads", gradients(model)[0], "grad.")
    memory, response = model.generate(
        batch, _special_token(case, "bos", 2), _special_token(case, "eos", 1)
    )
    compare.check("tokens", {"memory": memory, "response": response}, "out.sampled_")
    for start in ("out.", "grad."):
        compare.all_compared(start)


def _planner_batch(case: PI07Case) -> dict:
    """The case's inputs, cameras in lists; a video with one frame in [0, 1] becomes an image."""
    given = {name[3:]: value for name, value in case.tensors.items() if name.startswith("in.")}
    images, masks = [], []
    for i in range(len(given)):
        image = next((given[n] for n in (f"image{i}", f"images{i}", f"img{i}") if n in given), None)
        if image is None and f"video{i}" in given:
            image = given[f"video{i}"][:, -1] * 2 - 1
        if image is None:
            break
        names = (f"img_mask{i}", f"img_masks{i}", f"image_mask{i}", f"vid_mask{i}")
        images.append(image)
        masks.append(next(given[name] for name in names if name in given))
    texts = {name: value for name, value in given.items() if name.startswith(_PLANNER_TEXTS)}
    return texts | {"images": images, "img_masks": masks}


def _planner(case: PI07Case, batch: dict) -> PI07HighLevelPlannerModel:
    given = case.meta["config"]
    own = {name: given[name] for name in _PLANNER_SETTINGS if name in given}
    for text in ("memory", "response"):
        # Decoding produces as many tokens as the targets have.
        own[f"{text}_max_length"] = batch[f"{text}_tokens"].shape[1]
    vlm = given["vlm"] | {"gemma3_config": given["gemma3"], "disable_action_expert": True}
    own["vlm_config"] = vlm | {"gemma_expert_config": given.get("expert", {})}
    labels = {label: given["indicator_token_ids"][label] for label in PLANNER_LABELS}
    model = PI07HighLevelPlannerModel(PI07PlannerConfig.from_dict(own), labels)
    stored = engine_keys(read_header(case.folders.file(case.meta["weights_file"])))
    # The file also has weights of the expert and the projections, which the planner lacks.
    fill_parameters(model.stored_parameters(), stored)
    model.train()
    return model


def _special_token(case: PI07Case, name: str, default: int) -> int:
    """Id of BOS or EOS, Gemma's unless the case names it."""
    places = (case.meta, case.meta["config"], case.meta.get("special_tokens") or {})
    keys = (f"{name}_token_id", f"{name}_id", name)
    ids = [place[key] for place in places for key in keys if key in place]
    return int(np.asarray(ids[0])) if ids else default
