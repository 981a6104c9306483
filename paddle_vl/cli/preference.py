"""`paddle-vl precompute-reference`: log-probabilities of a reference, beside the data."""

import argparse

from paddle_vl.cli.commands import configure_training_runtime
from paddle_vl.cli.table import CONFIG, OVERRIDES, Command


def precompute_reference(options: argparse.Namespace) -> int:
    """Write the files."""
    configure_training_runtime()
    from paddle_vl.config.load import load_run_config
    from paddle_vl.train.build import run_family

    config = load_run_config(options.config, options.overrides)
    values = config.model_dump()
    preference, model = values.get("preference"), values["model"]
    if preference is None or values["train"].get("objective") != "preference":
        raise ValueError(f"{options.config} does not set train.objective=preference")
    if not getattr(config, "preference").has_reference:  # noqa: B009
        raise ValueError(f"preference.loss_type {preference['loss_type']} has no reference")
    # The model of this run is the reference itself.
    values["data"]["processor"] = values["data"]["processor"] or model["pretrained"]
    model |= {"pretrained": preference["ref_model"] or model["pretrained"]}
    model |= {"lora": None, "freeze": []}
    preference |= {"ref_model": None, "precompute_ref_log_probs": False}
    for path in run_family(type(config).model_validate(values)).precompute_reference():
        print(f"the reference's log-probabilities are in {path}")
    return 0


PRECOMPUTE = Command(
    precompute_reference,
    "log-probabilities of the reference of preference training, beside the data",
    "Compute the log-probabilities of all answers in data.train and data.eval under the reference, "
    "preference.ref_model or model.pretrained, and write them beside the data. Training with "
    "preference.precompute_ref_log_probs=true then needs no reference. The files have checksums of "
    "data, settings and weights, and a run refuses them when these are others.",
    "example:\n  paddle-vl precompute-reference dpo.yaml",
    [CONFIG, OVERRIDES],
)
