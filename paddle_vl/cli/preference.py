"""`paddle-vl precompute-reference`: log-probabilities of a reference, beside the data."""

import argparse

from paddle_vl.cli.commands import configure_training_runtime
from paddle_vl.cli.table import CONFIG, OVERRIDES, Command


def precompute_reference(options: argparse.Namespace) -> int:
    """Write the files."""
    configure_training_runtime()
    from paddle_vl.cli.hubs import read_run
    from paddle_vl.config.families import family_of_run

    config = read_run(options)
    for path in family_of_run(config).ask("precompute_reference", config):
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
