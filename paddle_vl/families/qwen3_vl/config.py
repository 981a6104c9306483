"""Configuration of Qwen3-VL, in both dialects of config.json.

The hub's files (transformers 4.57) have `rope_theta`, `rope_scaling` and `num_experts`;
transformers 5.x has `rope_parameters` and `num_local_experts`. Both are read, the first is written.

Source: configuration_qwen3_vl.py and configuration_qwen3_vl_moe.py of HF transformers.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from paddle_vl.families.qwen3_vl.text_config import (
    LAYERS,
    WIDTH,
    Qwen3VLMoeTextConfig,
    Qwen3VLTextConfig,
    plain_experts,
    plain_text,
)
from paddle_vl.files.checked_values import INERT_KEYS, Range, check_mapping, check_values
from paddle_vl.files.text_file import read_json_object, shown
from paddle_vl.nn.operations import ACTIVATIONS

_MOE_TYPE = "qwen3_vl_moe"
_VISION_RANGES = {
    "depth": LAYERS,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_heads": Range(1, 4096),
    # Red, green and blue.
    "in_channels": Range(3, 3),
    "patch_size": Range(1, 256),
    "temporal_patch_size": Range(1, 64),
    "spatial_merge_size": Range(1, 64),
    "out_hidden_size": WIDTH,
    "num_position_embeddings": Range(1, 1 << 24),
    "initializer_range": Range(0, 100),
    "deepstack_visual_indexes": Range(0),
    "rope_theta": Range(1, is_above=True),
}
_TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True)
class Qwen3VLVisionConfig:
    """The vision tower. Defaults are those of HF's configuration class."""

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    initializer_range: float = 0.02
    deepstack_visual_indexes: list[int] = field(default_factory=lambda: [8, 16, 24])
    rope_theta: float = 10000.0

    def __post_init__(self):
        check_values(self, "vision_config", _VISION_RANGES)
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"vision_config: hidden_act is {shown(self.hidden_act)}; choose one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 4:
            raise ValueError(
                f"vision_config: hidden_size {self.hidden_size} over num_heads {self.num_heads} "
                "must give a head width that is a multiple of 4"
            )
        if self.table_side**2 != self.num_position_embeddings:
            raise ValueError(
                f"vision_config: num_position_embeddings {self.num_position_embeddings} is not a "
                "square number"
            )
        outside = [i for i in self.deepstack_visual_indexes if not 0 <= i < self.depth]
        if outside:
            raise ValueError(
                f"vision_config: deepstack_visual_indexes {outside} lie outside the tower's "
                f"{self.depth} blocks"
            )
        if list(self.deepstack_visual_indexes) != sorted(set(self.deepstack_visual_indexes)):
            raise ValueError(
                f"vision_config: deepstack_visual_indexes {self.deepstack_visual_indexes} must "
                "ascend, each block once"
            )

    @property
    def table_side(self) -> int:
        """Side of the square table of learned positions."""
        return round(self.num_position_embeddings**0.5)

    @property
    def patch_dim(self) -> int:
        """Values of one flattened patch: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class Qwen3VLConfig:
    """Configuration of the complete model.

    Attributes:
        tie_word_embeddings: whether head and embedding share their weight.
        tie_flags_agree: False if the file's two tie flags disagree or one is missing; then the
            presence of `lm_head.weight` in the checkpoint decides.
    """

    text_config: Qwen3VLTextConfig = field(default_factory=Qwen3VLTextConfig)
    vision_config: Qwen3VLVisionConfig = field(default_factory=Qwen3VLVisionConfig)
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    tie_word_embeddings: bool = False
    tie_flags_agree: bool = field(default=True, compare=False, repr=False)

    def __post_init__(self):
        check_values(self, "", dict.fromkeys(_TOKEN_IDS, Range(0)))
        text, vision = self.text_config, self.vision_config
        if vision.out_hidden_size != text.hidden_size:
            raise ValueError(
                f"vision_config.out_hidden_size {vision.out_hidden_size} differs from "
                f"text_config.hidden_size {text.hidden_size}: visual embeddings enter the decoder "
                "unchanged, so both must be equal"
            )
        if len(vision.deepstack_visual_indexes) > text.num_hidden_layers:
            raise ValueError(
                f"{len(vision.deepstack_visual_indexes)} deepstack levels but only "
                f"{text.num_hidden_layers} decoder layers to add them to"
            )
        for name in _TOKEN_IDS:
            if not 0 <= getattr(self, name) < text.vocab_size:
                raise ValueError(
                    f"{name} {getattr(self, name)} lies outside text_config.vocab_size "
                    f"{text.vocab_size}"
                )
        ids = {name: getattr(self, name) for name in _TOKEN_IDS}
        if len(set(ids.values())) < len(ids):
            raise ValueError(f"{ids} must be four different tokens")

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "Qwen3VLConfig":
        """Read `config.json` of a model folder, or a JSON file.

        Raises:
            RuntimeError: the file cannot be read, or is damaged.
            ValueError: it is not a valid Qwen3-VL configuration.
        """
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        values = read_json_object(path, "a model's configuration")
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

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
        # transformers 5.x reads the top-level flag, 4.57 that of text_config.
        flags = [values.pop("tie_word_embeddings", None), text.pop("tie_word_embeddings", None)]
        for where, flag in zip(("", "text_config: "), flags, strict=True):
            if flag is not None and not isinstance(flag, bool):
                raise ValueError(
                    f"{where}tie_word_embeddings is {shown(flag)}; it must be true or false"
                )
        text, text_class = plain_text(text), Qwen3VLTextConfig
        if model_type == _MOE_TYPE:
            text, text_class = plain_experts(text), Qwen3VLMoeTextConfig
        types = (f"{model_type}_text", model_type), (f"{model_type}_vision", model_type)
        return cls(
            text_config=_build(text_class, text, "text_config", types[0]),
            vision_config=_build(
                Qwen3VLVisionConfig, _plain_vision(vision), "vision_config", types[1]
            ),
            tie_word_embeddings=bool(flags[1] if flags[0] is None else flags[0]),
            tie_flags_agree=flags[0] == flags[1],
            **_known(cls, values, "the configuration"),
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

    def save_pretrained(self, path: str | Path) -> None:
        """Write `config.json` into a folder."""
        from paddle_vl.files.text_file import write_text

        text = json.dumps(self.to_dict(), indent=2) + "\n"
        write_text(Path(path) / "config.json", text)

    def with_tie(self, tie: bool) -> "Qwen3VLConfig":
        """A copy with this tie flag."""
        return replace(self, tie_word_embeddings=tie, tie_flags_agree=True)


def _plain_vision(vision: dict[str, Any]) -> dict[str, Any]:
    rope = check_mapping(vision.pop("rope_parameters", None), "vision_config: rope_parameters")
    if rope.pop("rope_type", "axial") != "axial":
        raise ValueError("vision_config: rope_parameters.rope_type must be 'axial'")
    return vision | rope


def _build(cls, values: dict[str, Any], where: str, model_types: tuple[str, ...]):
    model_type = values.get("model_type", model_types[0])
    if model_type not in model_types:
        raise ValueError(f"{where}: model_type is {model_type!r}; expected one of {model_types}")
    return cls(**_known(cls, values, where))


def _known(cls, values: dict[str, Any], where: str) -> dict[str, Any]:
    """The values of the fields of `cls`; raises for other keys that have an effect."""
    names = {f.name for f in fields(cls)} - {"tie_flags_agree"}
    unknown = sorted(set(values) - names - INERT_KEYS)
    if unknown:
        raise ValueError(
            f"{where} has unknown keys {unknown}: remove them, or check that the file belongs to a "
            "Qwen3-VL model"
        )
    return {name: value for name, value in values.items() if name in names}
