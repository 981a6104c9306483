"""pi07's low-level policy: normalization, model inputs, losses, a rollout."""

from collections.abc import Mapping
from typing import cast

import numpy as np

from paddle_vl import PI07LowLevelPolicy
from paddle_vl.families.policy.features import FeatureType, PolicyFeature
from paddle_vl.families.policy.normalize import Normalizer
from paddle_vl.families.policy.tokenizers import ActionTokenizer, PromptTokenizer
from parity.golden import PI07Case
from parity.pi07_golden import Comparison, config_of, fill

_BOS, _MODES = 2, ("MEAN_STD", "MIN_MAX", "QUANTILE")
# The golden rollout empties its queue before this call.
_CLEARED_STEP = 3


class CharacterTokenizer:
    """The case's stand-in for Gemma's tokenizer: one id per character outside labels."""

    def __init__(self, label_ids: dict[str, list[int]]):
        self.label_ids = label_ids

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids = self.label_ids.get(text) or [130 + ord(character) % 120 for character in text]
        return [_BOS, *ids] if add_special_tokens else list(ids)

    def padded(self, texts, length: int, add_special_tokens: bool):
        ids, masks = (np.zeros((len(texts), length), dtype) for dtype in (np.int64, bool))
        for row, text in enumerate(texts):
            found = self.encode(text, add_special_tokens)[:length]
            ids[row, : len(found)], masks[row, : len(found)] = found, True
        return ids, masks


class FirstValueActionTokenizer:
    """The case's stand-in for FAST: the first action value in steps of 1/8."""

    def __init__(self, vocab_size: int = 40):
        self.vocab_size = vocab_size

    def __call__(self, actions_BCA: np.ndarray) -> list[list[int]]:
        steps = np.clip(np.round((actions_BCA[..., 0] + 1) * 8), 0, 30).astype(int) + 1
        return [row[: 4 + i % 3].tolist() for i, row in enumerate(steps)]


def run_normalize(case: PI07Case, compare: Comparison) -> None:
    """Every mode in both conventions and back, with per-sample rows of statistics."""
    given = case.tensors
    kinds: dict[str, FeatureType] = {"state": "STATE", "actions": "ACTION"}
    features = {name: PolicyFeature(kinds[name], given[f"in.{name}"].shape[-1:]) for name in kinds}
    statistics = statistics_of(case.tensors)
    for mode in _MODES:
        for version in (0, 1):
            modes: dict[str, str] = {kind: mode for kind in kinds.values()}
            normalizer = Normalizer(features, modes, version, len(statistics))
            normalizer.set_statistics(statistics)
            batch = {name: given[f"in.{name}"] for name in kinds}
            there = normalizer.normalize(batch, given["in.dataset_index"])
            back = normalizer.unnormalize(there, given["in.dataset_index"])
            compare.check("there", there, f"{mode}.v{version}.norm.")
            compare.check("back", back, f"{mode}.v{version}.unnorm.")
    compare.compared |= {name for name in given if name.startswith(("in.", "stats"))}
    compare.all_compared()


def run_policy(case: PI07Case, compare: Comparison) -> None:
    """A raw batch to model inputs and losses; observations to actions."""
    policy, given = _policy(case), case.tensors
    batch = {name[3:]: value for name, value in given.items() if name.startswith("in.")}
    drawn = {name: batch.pop(name) for name in ("noise", "time")}
    batch |= case.meta["strings"]
    inputs = policy.inputs.training_inputs(batch) | drawn
    for name, value in inputs.items():
        is_list = isinstance(value, list)
        found = {f"{name}{i}": one for i, one in enumerate(value)} if is_list else {name: value}
        compare.check("inputs", found, "model_in.")
    losses = policy(batch, **drawn)
    compare.check("losses", {name: losses[name] for name in ("MSE", "CE")}, "out.")
    policy.reset()
    steps = sum(name.endswith("out.action") for name in given)
    for n in range(steps):
        if n == _CLEARED_STEP:
            policy.action_queue.clear()
        start = f"rollout.step{n}.in."
        seen = {name.removeprefix(start): v for name, v in given.items() if name.startswith(start)}
        words = {name: [case.meta["strings"][name][0]] for name in ("prompt", "response")}
        action = policy.select_action(seen | words | {"dataset_index": [0]}, given["rollout.noise"])
        compare.check("rollout", {f"rollout.step{n}.out.action": action})
    for start in ("model_in.", "out."):
        compare.all_compared(start)


def _policy(case: PI07Case) -> PI07LowLevelPolicy:
    given, modes = case.tensors, case.meta["normalization"]
    cameras = {
        name[3:]: {"type": "VISUAL", "shape": list(value.shape[-3:])}
        for name, value in given.items()
        if name.startswith("in.camera")
    }
    config = config_of(case)
    config = config.changed(
        normalization_mapping={
            "VISUAL": "IDENTITY",
            "STATE": modes["state"],
            "ACTION": modes["actions"],
        },
        input_features={name: PolicyFeature(**feature) for name, feature in cameras.items()}
        | {"state": PolicyFeature("STATE", given["in.state"].shape[-1:])},
        output_features={"actions": PolicyFeature("ACTION", given["in.actions"].shape[-1:])},
    )
    vocabulary = config.vlm_config.discrete_action_vocab_size
    assert vocabulary is not None, "the case gives it"
    policy = PI07LowLevelPolicy(
        config,
        # The case has token ids in place of tokenizers.
        cast(PromptTokenizer, CharacterTokenizer(case.meta["config"]["indicator_token_ids"])),
        cast(ActionTokenizer, FirstValueActionTokenizer(vocabulary)),
        statistics_of(case.folders.case("16_").tensors),
    )
    fill(policy.model, case)
    return policy


def statistics_of(tensors: Mapping[str, np.ndarray]) -> list[dict[str, dict[str, np.ndarray]]]:
    """A case's normalization statistics: of each dataset group, by feature and statistic."""
    groups: dict[str, dict] = {}
    for name, value in tensors.items():
        if name.startswith("stats"):
            group, feature, statistic = name.split(".")
            groups.setdefault(group, {}).setdefault(feature, {})[statistic] = value
    return [groups[name] for name in sorted(groups)]
