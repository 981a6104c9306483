"""The normalizers of a policy and of a planner, and a file of their statistics."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.numpy import load_file, save_file

from paddle_vl.families.policy.features import PolicyConfig
from paddle_vl.families.policy.normalize import Normalizer

# Names of a policy's normalizers in its checkpoint.
NORMALIZERS = (
    "normalize_inputs",
    "normalize_targets",
    "normalize_discrete_actions",
    "unnormalize_outputs",
)
# Statistics of an exported policy, by their keys in a checkpoint.
STATISTICS_FILE = "statistics.safetensors"


def policy_normalizers(config: PolicyConfig, num_groups: int) -> dict[str, Normalizer]:
    """The four normalizers of a policy, without statistics."""
    inputs, outputs = config.input_features, config.output_features
    modes, version = config.normalization_mapping, config.normalization_version
    discrete = {"ACTION": "MIN_MAX"}
    made = ((inputs, modes), (outputs, modes), (outputs, discrete), (outputs, modes))
    return {
        name: Normalizer(features, of_kind, version, num_groups)
        for name, (features, of_kind) in zip(NORMALIZERS, made, strict=True)
    }


def planner_normalizers(config: PolicyConfig, num_groups: int) -> dict[str, Normalizer]:
    """The normalizer of a planner's inputs, without statistics."""
    modes, version = config.normalization_mapping, config.normalization_version
    inputs = Normalizer(config.input_features, modes, version, num_groups)
    return {"normalize_inputs": inputs}


def save_statistics(normalizers: Mapping[str, Normalizer], file: Path) -> None:
    """Write the statistics of normalizers."""
    save_file(
        {
            f"{owner}.{name}": value
            for owner, normalizer in normalizers.items()
            for name, value in normalizer.tensors.items()
        },
        file,
    )


def load_statistics(normalizers: Mapping[str, Normalizer], file: Path) -> None:
    """Set the statistics of normalizers from a file of `save_statistics`.

    Raises:
        RuntimeError: the file is of other normalizers.
    """
    stored = load_file(file)
    for owner, normalizer in normalizers.items():
        for name, value in normalizer.tensors.items():
            found = stored.get(f"{owner}.{name}")
            if found is None or found.shape != value.shape:
                raise RuntimeError(
                    f"{file} has no {owner}.{name} of shape {list(value.shape)}: export the "
                    "checkpoint again (paddle-vl export)"
                )
            normalizer.tensors[name] = found
