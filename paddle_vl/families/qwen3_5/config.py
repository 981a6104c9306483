"""Configuration of Qwen3.5, dense or mixture of experts; see
`paddle_vl.families.vlm.modeling.delta_config`."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar

from paddle_vl.families.vlm.modeling.config import Heads, Layers, VisionConfig, Width
from paddle_vl.families.vlm.modeling.delta_config import DeltaConfig, DeltaExpertsText, DeltaText
from paddle_vl.files.stored_settings import checked

# Keys without effect: routing weights are always normalized, and every layer has experts.
_INERT = DeltaText.inert | {"norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"}
_ONLY = {**DeltaText.only, "output_gate_type": ("swish", "silu")}


@checked
class Qwen3_5TextConfig(DeltaText):
    """The decoder. Defaults are those of HF's configuration class, rope_theta that of the
    published models."""

    inert = _INERT
    only = _ONLY

    hidden_size: Width = 4096
    num_hidden_layers: Layers = 32
    num_key_value_heads: Heads = 4


@checked
class Qwen3_5MoeTextConfig(DeltaExpertsText):
    """A decoder with experts in every layer. Defaults are those of HF's configuration class."""

    inert = _INERT
    only = _ONLY


def _tower() -> VisionConfig:
    return VisionConfig(out_hidden_size=4096, deepstack_visual_indexes=[])


@checked
class Qwen3_5Config(DeltaConfig):
    """Configuration of the complete model."""

    family: ClassVar[str] = "Qwen3.5"
    text_classes: ClassVar[Mapping[str, type[DeltaText]]] = {
        "qwen3_5": Qwen3_5TextConfig,
        "qwen3_5_moe": Qwen3_5MoeTextConfig,
    }

    text_config: Qwen3_5TextConfig | Qwen3_5MoeTextConfig = field(default_factory=Qwen3_5TextConfig)
    vision_config: VisionConfig = field(default_factory=_tower)

    @classmethod
    def named(cls, name: str) -> "Qwen3_5Config":
        """The configuration of a published size: `qwen3.5-4b`, or `Qwen3.5-35B-A3B`.

        Raises:
            ValueError: there is no such size.
        """
        from paddle_vl.families.qwen3_5.sizes import size_values

        return cls.from_dict(size_values(name))

    def to_dict(self) -> dict[str, Any]:
        if isinstance(self.text_config, Qwen3_5MoeTextConfig):
            return self.written("Qwen3_5Moe", "qwen3_5_moe")
        return self.written("Qwen3_5", "qwen3_5")
