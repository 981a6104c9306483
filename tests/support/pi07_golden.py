"""Golden cases of pi07, and the models that they have the weights of."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
from safetensors.numpy import load_file
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from paddle_vl.checkpoint.reading import fill_parameters
from paddle_vl.checkpoint.safetensors_io import read_header
from paddle_vl.families.pi07.checkpoint_map import engine_keys
from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.planner import PI07HighLevelPlannerModel
from paddle_vl.families.policy.tokenizers import PromptTokenizer
from paddle_vl.nn.placement import Placement
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


def with_window(config: Any, window: int) -> Any:
    """A configuration with Gemma 3's own decoder."""
    vlm = config.vlm_config
    text = vlm.gemma3_config.text_config
    scaling = {"rope_type": "linear", "factor": 8.0}
    other = text.other | {"sliding_window": window, "rope_scaling": scaling}
    gemma = replace(vlm.gemma3_config, text_config=replace(text, other=other))
    vlm = replace(vlm, gemma3_config=gemma, use_gemma3_attention=True)
    return replace(config, vlm_config=vlm)


def filled(model: Any) -> Any:
    """A model with those of the golden weights that it has."""
    stored = engine_keys(read_header(CASES / "weights_A.safetensors"))
    fill_parameters(model.stored_parameters(), stored)
    return model


def golden_model(placement: Placement | None = None, **settings: Any) -> PI07LowLevelFlowMatching:
    """The model of case 01, with drawn projections if groups have their own.

    Args:
        settings: of the policy; they change both levels.
    """
    description, _ = case("01_all_fields")
    config = PI07Config.from_dict(config_values(description)).changed(**settings)
    if config.per_group_projection:
        paddle.seed(0)
    labels = description["config"]["indicator_token_ids"]
    model = PI07LowLevelFlowMatching(config, labels, placement)
    return model if config.per_group_projection else filled(model)


def golden_planner(
    placement: Placement | None = None, **settings: Any
) -> PI07HighLevelPlannerModel:
    """The same backbone without an action expert, whose plans have 6 and 5 tokens.

    Args:
        settings: of the planner; they change both levels.
    """
    given = case("01_all_fields")[0]["config"]
    values = {
        "memory_max_length": 6,
        "response_max_length": 5,
        "vlm_config": given["vlm"]
        | {
            "gemma3_config": given["gemma3"],
            "gemma_expert_config": given["expert"],
            "disable_action_expert": True,
        },
    }
    config = replace(PI07PlannerConfig.from_dict(values), **settings)
    return filled(PI07HighLevelPlannerModel(config, given["indicator_token_ids"], placement))


def golden_batch() -> dict[str, Any]:
    """The batch of case 01."""
    _, tensors = case("01_all_fields")
    batch = under(tensors, "in.")
    for many in ("videos", "vid_masks", "subgoal_images", "subgoal_img_masks"):
        batch[many] = [batch.pop(f"{many[:-1]}{i}") for i in range(2)]
    return batch


def drawn_batch(
    rng: np.random.Generator,
    has: Mapping[str, Sequence[int]] = {},
    *,
    samples: int = 2,
    cameras: int = 2,
    steps: int = 6,
) -> dict[str, Any]:
    """A batch for the golden model with every field, and padding in all of them.

    Args:
        has: the samples that have `response`, `metadata` and `subgoal`; masked in the others.
    """
    frames, actions, states, slots = 3, 7, 5, 5

    def pictures(*shape: int) -> np.ndarray:
        return rng.random((samples, *shape, 3, 56, 56), dtype=np.float32)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(samples, *shape)).astype(np.float32)

    def lengths(least: int, most: int) -> np.ndarray:
        return np.arange(most) < rng.integers(least, most + 1, (samples, 1))

    goals = np.isin(np.arange(samples), has.get("subgoal", ()))
    return {
        "videos": [pictures(frames) for _ in range(cameras)],
        "vid_masks": [np.ones(samples, bool), rng.random(samples) < 0.5][:cameras],
        "subgoal_images": [pictures() * 2 - 1 for _ in range(cameras)],
        "subgoal_img_masks": [goals] * cameras,
        "obs_history_is_pad": rng.random((samples, frames)) < 0.3,
        "state": normal(frames, states),
        "actions": normal(steps, actions),
        "noise": normal(steps, actions),
        "time": rng.uniform(0.1, 0.9, samples).astype(np.float32),
        "delay": np.zeros(samples, np.int64),
        "actions_is_pad": ~lengths(3, steps),
        "real_action_dim": rng.integers(4, actions + 1, samples),
        "discrete_actions": rng.integers(0, 40, (samples, slots)),
        "discrete_action_masks": lengths(2, slots),
        **_drawn_texts(rng, samples, has, response=6),
    }


def drawn_planner_batch(
    rng: np.random.Generator,
    has: Mapping[str, Sequence[int]] = {},
    *,
    samples: int = 2,
    cameras: int = 2,
) -> dict[str, Any]:
    """A batch for the golden planner, see `drawn_batch`."""
    shape, everything = (samples, 3, 56, 56), tuple(range(samples))
    return {
        "images": [rng.uniform(-1, 1, shape).astype(np.float32) for _ in range(cameras)],
        "img_masks": [np.ones(samples, bool), rng.random(samples) < 0.5][:cameras],
        **_drawn_texts(rng, samples, {**has, "response": everything}, memory=6, response=5),
    }


def _drawn_texts(
    rng: np.random.Generator, samples: int, has: Mapping[str, Sequence[int]], **own: int
) -> dict[str, np.ndarray]:
    """Tokens, of which some are padding, and masks."""
    found = {}
    for name, length in {"lang": 9, "metadata": 7, **own}.items():
        found[f"{name}_tokens"] = rng.integers(0, 250, (samples, length))
        masks = np.arange(length) < rng.integers(length // 2 + 1, length + 1, (samples, 1))
        if name in ("metadata", "response"):
            masks &= np.isin(np.arange(samples), has.get(name, ()))[:, None]
        found[f"{name}_masks"] = masks
    return found


def group_statistics() -> list[dict[str, dict[str, np.ndarray]]]:
    """The normalization statistics of the two dataset groups of cases 16 and 18."""
    return statistics_of(case("16_normalize")[1])


def character_tokenizer() -> PromptTokenizer:
    """A real tokenizer: Gemma's special tokens, and one id per printable character."""
    special = ["<pad>", "<eos>", "<bos>"]
    names = [*special, "<unk>", "\n", *map(chr, range(32, 127))]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.add_special_tokens([AddedToken(name, special=True) for name in special])
    return PromptTokenizer(made, bos_id=2)


class CharacterTokenizer(pi07_policy.CharacterTokenizer):
    """Case 18's substitute for Gemma's tokenizer, with the case's ids of labels."""

    def __init__(self):
        super().__init__(case("18_policy_level")[0]["config"]["indicator_token_ids"])
