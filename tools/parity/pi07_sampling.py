"""Sampling of pi07 with cached keys and values: every Euler step."""

import paddle

from parity.comparison import CaseReport
from parity.pi07_golden import GoldenCase, model_of
from parity.pi07_quantities import (
    Comparison,
    Recording,
    array,
    cache_quantities,
    prefix_quantities,
    samples_of,
    suffix_quantities,
)

_NOT_FOR_SAMPLING = {
    "actions", "time", "discrete_actions", "discrete_action_masks", "actions_is_pad",
    "real_action_dim", "delay", "noise", "action_prefix",
}  # fmt: skip


def run_sampling(case: GoldenCase, report: CaseReport) -> None:
    """The prefix, the cache, all steps, and the actions."""
    model, inputs, compare = model_of(case), case.inputs(), Comparison(case, report)
    model.eval()
    batch = {name: value for name, value in inputs.items() if name not in _NOT_FOR_SAMPLING}
    # A delay of every sample comes from the training case whose inputs these are.
    delay = int(inputs["delay"]) if "action_prefix" in inputs else 0
    steps = case.meta["num_denoise_steps"]
    with Recording(model) as recorded:
        actions = model.sample_actions(
            batch, inputs["noise"], delay, inputs.get("action_prefix"), num_steps=steps
        )
    calls = recorded.calls
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
    for n in range(steps):
        x_t, time = calls["suffix input"][n][:2]
        rows, cond = calls["suffix"][n]
        values = {"x_t": x_t, "time_bc": time, "embs": rows, "adarms_cond": cond}
        values["final"] = passes[n + 1].suffix
        found = {f"out.step{n}.suffix.{name}": array(value) for name, value in values.items()}
        found[f"out.step{n}.v_t"] = array(calls["velocity"][n].astype(paddle.float32))
        compare.check("steps", found)
    compare.check("actions", {"out.actions": array(actions)})
    compare.all_compared()
