"""Settings of preference training, under TRL's names. Read without Paddle."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from paddle_vl.config.section import FilePath, OnlyWith, Section

PairLoss = Literal[
    "sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair",
    "sppo_hard", "apo_zero", "apo_down", "discopop", "aot", "aot_unpaired", "dpop", "kto_pair",
    "normalized", "sft_per_pair", "sft", "cpo", "simpo", "or", "orpo", "kto",
    "apo_zero_unpaired",
]  # fmt: skip
UNPAIRED = ("kto", "apo_zero_unpaired")
WITHOUT_REFERENCE = ("cpo", "simpo", "or", "orpo")
_PAIRED = tuple(name for name in get_args(PairLoss) if name not in UNPAIRED)
_OF_MARGIN = ("sigmoid", "robust", "hinge", "exo_pair", "apo_down", "discopop", "cpo")
# The losses that read a setting, of settings that not all losses read.
_READ_BY = {
    "loss_weights": _PAIRED,
    "label_smoothing": (
        "sigmoid", "robust", "exo_pair", "sigmoid_norm", "aot", "aot_unpaired", "normalized",
        "cpo", "simpo",
    ),
    "cpo_alpha": ("cpo",),
    "simpo_gamma": ("simpo",),
    "desirable_weight": UNPAIRED,
    "undesirable_weight": UNPAIRED,
    "ld_alpha": _PAIRED,
    "use_weighting": _PAIRED,
    "f_divergence_type": _OF_MARGIN,
    "discopop_tau": ("discopop",),
    "dpop_lambda": ("dpop",),
}  # fmt: skip
# What ms-swift, LLaMA-Factory and PaddleFormers call a setting of the same meaning.
_OTHER_NAMES = {
    "pref_loss": "loss_type", "pref_beta": "beta", "dpo_label_smoothing": "label_smoothing",
    "pref_ftx": "rpo_alpha", "sft_loss_ratio": "rpo_alpha", "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
}  # fmt: skip


class PreferenceConfig(Section):
    """Preference training (train.objective: preference), see docs/preference.md."""

    loss_type: list[PairLoss] = Field(default=["sigmoid"], min_length=1)
    """losses of pairs (sigmoid is DPO), without a reference cpo, simpo or
    orpo, or on single rated
    answers kto or apo_zero_unpaired; several are added, e.g. [sigmoid, bco_pair, sft] (MPO)"""
    loss_weights: list[float] | None = None
    """a weight for each of loss_type; default: 1"""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """how strongly the policy is held at the reference; for ipo its tau, for orpo its lambda; simpo
    needs about 2"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """assumed share of pairs with exchanged answers: cDPO with sigmoid; for robust and exo_pair"""
    rpo_alpha: Annotated[float | None, Field(gt=0)] = None
    """add this times the mean cross entropy over the chosen answers' tokens (as loss_type sft)"""
    cpo_alpha: Annotated[float, Field(ge=0)] = 1.0
    """the same term's weight with loss_type cpo"""
    simpo_gamma: float = 0.5
    """margin that simpo wants, in the unit of rewards"""
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """weight of desirable answers with loss_type kto or apo_zero_unpaired"""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """weight of undesirable answers with loss_type kto or apo_zero_unpaired"""
    ld_alpha: Annotated[float | None, Field(ge=0, le=1)] = None
    """weight of an answer's tokens beyond the length of the pair's shorter answer (LD-DPO)"""
    use_weighting: bool = False
    """weigh each pair by how likely its answers are under the policy (WPO)"""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = (
        "reverse_kl"
    )
    """divergence from the reference"""
    f_alpha_divergence_coef: Annotated[
        float, OnlyWith("preference.f_divergence_type", ["alpha_divergence"])
    ] = 0.5
    """alpha of alpha_divergence, not 1"""
    discopop_tau: Annotated[float, Field(gt=0)] = 0.05
    """temperature of discopop"""
    dpop_lambda: Annotated[float, Field(ge=0)] = 50.0
    """weight of dpop's penalty for chosen answers below the reference"""
    ref_model: FilePath | None = None
    """the reference; default: model.pretrained, with model.lora without its adapters"""
    precompute_ref_log_probs: bool = False
    """read the reference's values from the files beside data.train and data.eval that the command
    for it has written, see docs/preference.md"""
    reference_free: bool = False
    """a reference that gives every answer the same probability"""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, values: Any) -> Any:
        """With the names of other packages replaced, and a single loss as a list."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for other, name in _OTHER_NAMES.items():
            if other in values:
                if name in values:
                    raise ValueError(f"{other} and {name} are the same setting: set one of them")
                values[name] = values.pop(other)
        if isinstance(values.get("loss_type"), str):
            values["loss_type"] = [values["loss_type"]]
        return values

    @property
    def is_unpaired(self) -> bool:
        """Whether samples are single rated answers."""
        return self.loss_type[0] in UNPAIRED

    @property
    def has_baseline(self) -> bool:
        """Whether answers are compared with mismatched ones too, which is KTO's baseline."""
        return self.loss_type[0] == "kto"

    @property
    def has_odds(self) -> bool:
        """Whether the loss is of odds of answers (ORPO)."""
        return "or" in self.loss_type or "orpo" in self.loss_type

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return not (self.reference_free or any(n in WITHOUT_REFERENCE for n in self.loss_type))

    @property
    def pair_weights(self) -> dict[str, float]:
        """Weights of the losses that are means over pairs."""
        weights = self.loss_weights or [1.0] * len(self.loss_type)
        return {n: w for n, w in zip(self.loss_type, weights, strict=True) if n != "sft"}

    @property
    def sft_weight(self) -> float:
        """Weight of the mean cross entropy over the chosen answers' tokens."""
        weights = self.loss_weights or [1.0] * len(self.loss_type)
        own = sum(w for n, w in zip(self.loss_type, weights, strict=True) if n == "sft")
        own += self.cpo_alpha if "cpo" in self.loss_type else 0.0
        return own + ("orpo" in self.loss_type) + (self.rpo_alpha or 0.0)

    def problems(self) -> Iterator[str]:
        """Messages about settings that contradict each other."""
        names = self.loss_type
        if self.loss_weights is not None and len(self.loss_weights) != len(names):
            yield (
                f"preference.loss_weights has {len(self.loss_weights)} weights for {len(names)} "
                "losses of preference.loss_type: give one for each"
            )
        if len({*names}) < len(names):
            yield f"preference.loss_type {names} names a loss twice: add up their loss_weights"
        alone = [n for n in names if n in (*UNPAIRED, *WITHOUT_REFERENCE)]
        if alone and len(names) > 1 and {*names} - {alone[0], "sft", "sft_per_pair"}:
            yield (
                f"preference.loss_type {names} mixes {alone[0]} with losses of another kind: only "
                "sft and sft_per_pair can be added to it"
            )
        if any(n in UNPAIRED for n in names) and (len(names) > 1 or self.rpo_alpha):
            yield (
                f"preference.loss_type {names} (rpo_alpha {self.rpo_alpha}): {alone[0]} is of "
                "single answers, to which no loss of pairs can be added; name it alone"
            )
        for setting, losses in _READ_BY.items():
            value, default = getattr(self, setting), type(self).model_fields[setting].default
            if value != default and not {*losses} & {*names}:
                yield (
                    f"preference.{setting} is {value}, which preference.loss_type {names} does not "
                    f"read: remove it, or use one of {', '.join(losses)}"
                )
        if "exo_pair" in names and not self.label_smoothing:
            yield (
                "preference.label_smoothing is 0, with which exo_pair is infinite: set it, e.g. "
                "to 1e-3"
            )
        if self.f_divergence_type == "alpha_divergence" and self.f_alpha_divergence_coef == 1:
            yield "preference.f_alpha_divergence_coef is 1: use f_divergence_type forward_kl for it"
        if not self.has_reference and (self.ref_model or self.precompute_ref_log_probs):
            yield (
                f"preference.loss_type {names} (reference_free {self.reference_free}) has no "
                "reference: remove preference.ref_model and precompute_ref_log_probs"
            )
        if self.precompute_ref_log_probs and self.has_baseline:
            yield (
                "preference.precompute_ref_log_probs is set, but kto compares answers with other "
                "rows' prompts, which differ from epoch to epoch: remove it"
            )
