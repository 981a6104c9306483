"""Configuration of Qwen3-VL, in both dialects of config.json.

The hub's files (transformers 4.57) have `rope_theta`, `rope_scaling` and `num_experts`;
transformers 5.x has `rope_parameters` and `num_local_experts`. Both are read, the first is written.

Source: configuration_qwen3_vl.py and configuration_qwen3_vl_moe.py of HF transformers.
"""

from dataclasses import asdict, field
from typing import Any, TypeVar

from paddle_vl.families.qwen3_vl.text_config import (
    Qwen3VLMoeTextConfig,
    Qwen3VLTextConfig,
    plain_experts,
    plain_text,
)
from paddle_vl.families.vlm.config import VisionConfig, VLConfig, tie_settings
from paddle_vl.files.checked_values import (
    INERT_KEYS,
    check_mapping,
    checked,
    known_values,
    read_section,
)

T = TypeVar("T")
# HF's name.
Qwen3VLVisionConfig = VisionConfig
_MOE_TYPE = "qwen3_vl_moe"


@checked
class Qwen3VLConfig(VLConfig):
    """Configuration of the complete model."""

    text_config: Qwen3VLTextConfig = field(default_factory=Qwen3VLTextConfig)

    @classmethod
    def named(cls, name: str) -> "Qwen3VLConfig":
        """The configuration of a published size: `qwen3-vl-8b`, or `Qwen3-VL-8B-Instruct`.

        Raises:
            ValueError: there is no such size.
        """
        from paddle_vl.families.qwen3_vl.sizes import size_values

        return cls.from_dict(size_values(name))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Qwen3VLConfig":
        """Build from the content of a config.json, in either dialect.

        Raises:
            ValueError: another model type, unknown keys, or values out of range.
        """
        values = check_mapping(values, "the configuration")
        model_type = values.get("model_type", "qwen3_vl")
        if model_type not in ("qwen3_vl", _MOE_TYPE):
            raise ValueError(f"model_type is {model_type!r}; 'qwen3_vl' or {_MOE_TYPE!r} is needed")
        text = check_mapping(values.pop("text_config", None), "text_config")
        vision = check_mapping(values.pop("vision_config", None), "vision_config")
        ties = tie_settings(values, text)
        text, text_class = plain_text(text), Qwen3VLTextConfig
        if model_type == _MOE_TYPE:
            text, text_class = plain_experts(text), Qwen3VLMoeTextConfig
        vision = _plain_vision(vision)
        known, _ = known_values(cls, values, INERT_KEYS, "a configuration of Qwen3-VL")
        return cls(
            **known
            | {
                "text_config": _section(text_class, text, "text_config", model_type),
                "vision_config": _section(VisionConfig, vision, "vision_config", model_type),
                **ties,
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json in the hub's dialect, with both tie flags."""
        text, vision = asdict(self.text_config), asdict(self.vision_config)
        has_experts = isinstance(self.text_config, Qwen3VLMoeTextConfig)
        model_type = _MOE_TYPE if has_experts else "qwen3_vl"
        if has_experts:
            text["norm_topk_prob"] = True
        section = text.pop("mrope_section")
        text |= {
            "model_type": f"{model_type}_text",
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": section,
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": self.tie_word_embeddings,
        }
        vision.pop("rope_theta")
        vision["model_type"] = model_type
        name = "Qwen3VLMoe" if has_experts else "Qwen3VL"
        return {
            "architectures": [f"{name}ForConditionalGeneration"],
            "model_type": model_type,
            "image_token_id": self.image_token_id,
            "video_token_id": self.video_token_id,
            "vision_start_token_id": self.vision_start_token_id,
            "vision_end_token_id": self.vision_end_token_id,
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": text,
            "vision_config": vision,
        }


def _plain_vision(vision: dict[str, Any]) -> dict[str, Any]:
    rope = check_mapping(vision.pop("rope_parameters", None), "vision_config: rope_parameters")
    if rope.pop("rope_type", "axial") != "axial":
        raise ValueError("vision_config: rope_parameters.rope_type must be 'axial'")
    return vision | rope


def _section(cls: type[T], values: dict[str, Any], where: str, model_type: str) -> T:
    """A section of config.json; keys without effect are left out."""
    types = (f"{model_type}_{where.removesuffix('_config')}", model_type)
    if (found := values.get("model_type", model_type)) not in types:
        raise ValueError(f"{where}: model_type is {found!r}; expected one of {types}")
    known, _ = known_values(cls, values, INERT_KEYS, f"{where} of Qwen3-VL")
    return read_section(cls, known, where)
