"""Golden cases of learning from rewards: their files, and the settings of their losses."""

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from safetensors.numpy import load_file

from paddle_vl.families.vlm.grpo.objective import RolloutLoss
from paddle_vl.families.vlm.grpo.settings import GRPOConfig
from parity.comparison import CaseReport
from parity.golden import Case, Folders

_FAMILIES = ("qwen_vl", "qwen3_5")
# Ours of TRL's settings, which a case names in short.
_NAMES = {
    "level": "importance_sampling_level",
    "bias": "use_bias_correction_kl",
    "top_entropy": "top_entropy_quantile",
    "entropy": "entropy_coef",
    "opsm": "off_policy_mask_threshold",
    "is_mode": "importance_sampling_mode",
    "clip_min": "importance_sampling_clip_min",
    "clip_max": "importance_sampling_clip_max",
}
_DUAL = {"clip_ratio_c": 3.0}
_KL = {**_DUAL, "beta": 0.04, "use_bias_correction_kl": False, "kl_clamp": 10.0}
_SWIFT = {
    "loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False,
    "importance_sampling_weighs_kl": True, "importance_sampling_clip_max": 2.0,
}  # fmt: skip
_TRUNCATED = {**_DUAL, "importance_sampling_clip_max": 2.0}
# Settings of losses that a case gives as formulas, most of them verl's.
_OF_FORMULAS: dict[str, dict[str, Any]] = {
    "verl_token_mean_dual3": _DUAL,
    "verl_seq_mean_token_mean": {**_DUAL, "loss_agg_mode": "seq-mean-token-mean"},
    "verl_seq_mean_token_sum": {**_DUAL, "loss_agg_mode": "seq-mean-token-sum"},
    "verl_seq_mean_token_sum_norm": {**_DUAL, "loss_agg_mode": "seq-mean-token-sum-norm"},
    "verl_gspo": {
        "loss_agg_mode": "seq-mean-token-mean", "importance_sampling_level": "sequence",
        "epsilon": 3e-4, "epsilon_high": 4e-4,
    },
    "verl_cispo": {"loss_type": "cispo_range"},
    "swift_real_tau0.5": {"loss_type": "real"},
    "swift_fipo": {"loss_type": "fipo"},
    "verl_geo_mean": {"loss_type": "gmpo", "epsilon": 0.4},
    **{f"verl_kl_{name}": {**_KL, "kl_estimator": name} for name in ("k1", "abs", "k2", "k3")},
    "verl_kl_k3+": {**_KL, "kl_estimator": "k3+"},
    "verl_token_tis2": {**_TRUNCATED, "importance_sampling_mode": "token_truncate"},
    "verl_seq_tis2": {**_TRUNCATED, "importance_sampling_mode": "sequence_truncate"},
    "verl_bypass": {**_DUAL, "old_log_probs": "sampler"},
    **{
        f"swift_{kind}_{rule}2_beta0.04": {**_SWIFT, "importance_sampling_mode": f"{own}_{rule}"}
        for kind, own in (("token", "token"), ("sequence", "geometric"))
        for rule in ("truncate", "mask")
    },
    # ms-swift's divisor is that of rows here too.
    "swift_off_policy_mask0.05": {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
}  # fmt: skip


class GRPOCase(Case):
    """A case of learning from rewards."""

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        return load_file(self.file.with_name("tensors.safetensors"))

    @cached_property
    def slopes(self) -> dict[str, np.ndarray]:
        return load_file(self.file.with_name("dloss_dlogps.safetensors"))

    @cached_property
    def samples(self) -> dict[str, np.ndarray]:
        return load_file(self.file.with_name("grad_samples.safetensors"))

    @cached_property
    def full(self) -> dict[str, np.ndarray]:
        file = self.file.with_name("grads_full.safetensors")
        return load_file(file) if file.is_file() else {}

    @property
    def model(self) -> str:
        return self.meta.get("model") or "dense_untied"

    @property
    def is_qwen3_5(self) -> bool:
        return self.model.startswith("qwen3_5")

    @property
    def is_adapter(self) -> bool:
        return self.meta["case"].startswith("lora")

    def beside(self, name: str) -> Path:
        return self.file.parents[1] / name


class GRPOFolders(Folders[GRPOCase]):
    """Cases of learning from rewards, and the models, which may lie in `qwen_vl` and `qwen3_5`
    beside a folder."""

    def __init__(self, folders: list[Path]):
        super().__init__(folders)
        near = [folder.parent / each / "models" for folder in folders for each in _FAMILIES]
        self.models: dict[str, Path] = {}
        for file in [
            file for root in [*folders, *near] for file in sorted(root.rglob("config.json"))
        ]:
            kind = json.loads(file.read_text(encoding="utf-8")).get("model_type", "")
            name = file.parent.name
            if kind.startswith("qwen3_5"):
                name = f"qwen3_5_{name.removeprefix('dense_')}"
            self.models.setdefault(name, file.parent)

    def _case(self, file: Path) -> GRPOCase | None:
        kinds = {
            "case.json": "answers", "traj.json": "trajectory", "advantages.json": "advantages",
            "accumulation.json": "accumulation", "sampling_order.json": "order",
        }  # fmt: skip
        kind = kinds.get(file.name)
        if kind is None:
            return None
        meta = json.loads(file.read_text(encoding="utf-8"))
        # Other golden data have such files too.
        of_rewards = {"answers": "num_generations", "trajectory": "runs", "accumulation": "cases"}
        if kind in of_rewards and of_rewards[kind] not in meta:
            return None
        name = file.parent.name if kind in ("answers", "trajectory") else file.stem
        return GRPOCase(name, kind, file, self)


def settings_of(name: str, given: Mapping[str, Any], case: Mapping[str, Any]) -> GRPOConfig:
    """Of a loss of a case; a loss of TRL has no bound of the KL estimate."""
    sizes = {"num_generations": case["num_generations"]}
    sizes |= {"max_completion_length": case["max_completion_length"]}
    sizes |= {"temperature": case.get("temperature", 1.0)}
    if name in _OF_FORMULAS:
        return GRPOConfig(**sizes | _OF_FORMULAS[name])
    kinds = {kind: given[kind] for kind in ("gmpo", "rloo") if given.get(kind)}
    own = {_NAMES.get(key, key): value for key, value in given.items()}
    own = {key: value for key, value in own.items() if key not in ("old", *kinds)}
    own |= {"loss_type": next(iter(kinds))} if kinds else {}
    return GRPOConfig(**sizes, **own, kl_clamp=None)


def losses_of(case: GRPOCase) -> Iterator[tuple[str, Mapping[str, Any], GRPOConfig]]:
    sizes = dict(case.meta)
    for name, wanted in case.meta["losses"].items():
        if name.endswith("token_sum_norm"):
            # verl divides by the padded length, here that of the case.
            sizes["max_completion_length"] = case.tensors["loss_mask"].shape[1]
        yield name, wanted, settings_of(name, wanted.get("settings", {}), sizes)
        sizes["max_completion_length"] = case.meta["max_completion_length"]


def is_on_policy(wanted: Mapping[str, Any]) -> bool:
    return wanted.get("settings", {}).get("old") is False


def advantages_of(case: GRPOCase, name: str) -> np.ndarray:
    key = "advantages" + (f".{name}" if name.startswith("rloo") else "")
    return case.tensors[key]


def reads_sampler(name: str, settings: GRPOConfig) -> bool:
    """Whether a loss of a case is given the sampler's log-probabilities."""
    if name.startswith("swift_off_policy"):
        return True
    return settings.importance_sampling_mode is not None or settings.old_log_probs == "sampler"


def loss_of(loss: RolloutLoss, terms: paddle.Tensor) -> tuple[float, dict[str, float]]:
    means = dict(zip(loss.terms, terms.numpy().tolist(), strict=True))
    return sum(weight * means[n] for n, weight in loss.terms.items() if weight), means


def compare_metrics(
    report: CaseReport,
    name: str,
    means: Mapping[str, float],
    wanted: Mapping[str, float],
    tolerance: float,
) -> None:
    for key, value in wanted.items():
        # Of the generation, and of settings.
        if key.startswith("sampling/") or key in ("entropy_coef", "aux_loss"):
            continue
        if key not in means:
            report.fail("metrics", f"{name} {key}", "it is not reported")
        elif "clip" in key:
            report.absolute("clips", f"{name} {key}", means[key], 1e-6, value)
        else:
            allowed = tolerance * max(1, abs(value))
            report.absolute("metrics", f"{name} {key}", means[key], allowed, value)
