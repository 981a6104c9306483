"""Golden cases of pi07."""

import json
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from paddle_vl.families.pi07.config import PI07Config
from tests.support.tiny import GOLDEN

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
    groups: list[dict[str, dict[str, np.ndarray]]] = [{}, {}]
    for name, value in case("16_normalize")[1].items():
        if name.startswith("stats"):
            group, feature, stat = name.removeprefix("stats").split(".")
            groups[int(group)].setdefault(feature, {})[stat] = value
    return groups


class CharacterTokenizer:
    """Case 18's substitute for Gemma's tokenizer: one id per character."""

    def __init__(self):
        self._fixed = case("18_policy_level")[0]["config"]["indicator_token_ids"]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids = self._fixed.get(text) or [130 + ord(character) % 120 for character in text]
        return [2, *ids] if add_special_tokens else list(ids)

    def padded(self, texts, length, add_special_tokens):
        ids, mask = np.zeros((len(texts), length), np.int64), np.zeros((len(texts), length), bool)
        for row, text in enumerate(texts):
            found = self.encode(text, add_special_tokens)[:length]
            ids[row, : len(found)], mask[row, : len(found)] = found, True
        return ids, mask


class FirstValueActionTokenizer:
    """Case 18's substitute for FAST: the first action value, in steps of 1/8."""

    vocab_size = 40

    def __call__(self, actions_BCA: np.ndarray) -> list[list[int]]:
        steps = np.clip(np.round((actions_BCA[..., 0] + 1) * 8), 0, 30).astype(int) + 1
        return [row[: 4 + i % 3].tolist() for i, row in enumerate(steps)]
