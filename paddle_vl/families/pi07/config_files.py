"""Configuration files of OpenTau's and LeRobot's policies, whichever policy they are of."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from paddle_vl.families.pi07.features import feature_from_dict
from paddle_vl.files.checked_values import check_mapping
from paddle_vl.files.json_file import read_json_object
from paddle_vl.files.named_errors import write_text

# Where a configuration may lie, best first; the last two hold the policy's as a section.
CONFIG_FILES = ("config.json", "train_config.json", "hf_config.json")
# OpenTau's settings that would change what comes out; only these values are supported.
_ONLY = {"accel_prefix": None, "n_candidates": 1, "action_chunk_critic_path": None}
# Keys without effect here: how the originals run, where they publish.
_UNUSED = frozenset(
    """
    action_decoder_latency_lower action_decoder_latency_mean action_decoder_latency_std
    action_decoder_latency_upper cloud_vlm_latency_lower cloud_vlm_latency_mean
    cloud_vlm_latency_std cloud_vlm_latency_upper compile_mode compile_model device init_strategy
    license opentau_version pretrained_path private push_to_hub repo_id
    skip_input_resolution_check tags torch_compile_mode type use_amp use_peft use_torch_compile
    """.split()
)


def read_config(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """A policy's configuration, from its folder or a JSON file: the file and its content.

    Raises:
        RuntimeError: there is none, or it is damaged.
    """
    path = Path(path)
    candidates = [path / name for name in CONFIG_FILES] if path.is_dir() else [path]
    file = next((file for file in candidates if file.is_file()), None)
    if file is None:
        raise RuntimeError(
            f"{path} has no configuration: none of {', '.join(f.name for f in candidates)}"
        )
    values = read_json_object(file, "a policy's configuration")
    if isinstance(values.get("policy"), dict):
        values = values["policy"]
    return file, values


def write_config(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write `config.json` into a folder."""
    text = json.dumps(values, indent=2) + "\n"
    write_text(Path(path) / CONFIG_FILES[0], text)


def known_values(cls: type, values: Mapping[str, Any], policy_type: str) -> dict[str, Any]:
    """The content of a file as arguments of `cls`, keys without effect in `other`.

    Raises:
        ValueError: another policy's type, keys that are not known, values not supported.
    """
    values = {name: value for name, value in values.items() if name != "other"}
    kind = values.get("type", policy_type)
    if kind != policy_type:
        raise ValueError(f"type is {kind!r}; this configuration reads {policy_type!r}")
    for name, only in _ONLY.items():
        if (found := values.pop(name, only)) != only:
            raise ValueError(f"{name} is {found!r}, which is not supported; it must be {only}")
    names = {f.name for f in fields(cls)}
    if unknown := sorted(set(values) - names - _UNUSED):
        raise ValueError(
            f"the configuration has keys that {policy_type} does not know: {unknown}; correct or "
            "remove them"
        )
    for name in names & {"input_features", "output_features"}:
        features = check_mapping(values.get(name), name)
        values[name] = {key: feature_from_dict(key, f) for key, f in features.items()}
    other = {name: value for name, value in values.items() if name not in names}
    return {n: v for n, v in values.items() if n in names} | {"other": other}


def written_values(config: Any, policy_type: str) -> dict[str, Any]:
    """The content of a file in the original's form."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "other"}
    values |= {name: list(v) for name, v in values.items() if isinstance(v, tuple)}
    values["vlm_config"] = config.vlm_config.to_dict()
    for name in set(values) & {"input_features", "output_features"}:
        values[name] = {key: feature.to_dict() for key, feature in values[name].items()}
    return {"type": policy_type, **config.other, **values}


def without_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Settings less those that have their default."""
    return {
        name: value
        for name, value in values.items()
        if name not in defaults or value != defaults[name]
    }
