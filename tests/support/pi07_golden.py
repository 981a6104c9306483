"""Golden cases of pi07."""

import json
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from paddle_vl.families.pi07.config import PI07Config
from parity import pi07_policy
from parity.pi07_policy import FirstValueActionTokenizer, statistics_of
from tests.support.tiny import GOLDEN

__all__ = ["FirstValueActionTokenizer"]

CASES = GOLDEN / "pi07"
# The policy fields of `18_policy_level.json`.
_POLICY = {
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ACTION": "MEAN_STD"},
    "resize_imgs_with_padding": (56, 56),
    "input_features": {
        "camera0": {"type": "VISUAL", "shape": [3, 56, 56]},
        "camera1": {"type": "VISUAL", "shape": [3, 56, 56]},
        "state": {"type": "STATE", "shape": [5]},
    },
    "output_features": {"actions": {"type": "ACTION", "shape": [7]}},
}


def case(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A case's description and its tensors."""
    tensors = load_file(CASES / f"{name}.safetensors")
    return json.loads((CASES / f"{name}.json").read_text(encoding="utf-8")), tensors


def under(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Tensors whose names begin with `prefix`, by name without the prefix."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def config_values(description: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A case's configuration in the form of config.json."""
    values = dict(description["config"])
    del values["indicator_token_ids"]
    vlm = values.pop("vlm")
    vlm |= {"gemma3_config": values.pop("gemma3"), "gemma_expert_config": values.pop("expert")}
    return values | _POLICY | {"vlm_config": vlm} | changes


def policy_config(**changes: Any) -> PI07Config:
    """The configuration of case 18."""
    return PI07Config.from_dict(config_values(case("18_policy_level")[0], **changes))


def group_statistics() -> list[dict[str, dict[str, np.ndarray]]]:
    """The normalization statistics of the two dataset groups of cases 16 and 18."""
    return statistics_of(case("16_normalize")[1])


class CharacterTokenizer(pi07_policy.CharacterTokenizer):
    """Case 18's substitute for Gemma's tokenizer, with the case's ids of labels."""

    def __init__(self):
        super().__init__(case("18_policy_level")[0]["config"]["indicator_token_ids"])
