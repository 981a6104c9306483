"""Configuration of PaddleOCR-VL in both dialects of config.json.

The hub's files are flat: the decoder's keys beside those of the model. transformers 5.x nests them
in `text_config`, and leaves what it does not know where it was. Both are read, the flat one, which
PaddleX needs, is written. Every size must be in the file: the defaults of the programs that read
it differ from the published models, and from each other.

Source: configuration_paddleocr_vl.py of HF transformers, and the hub's.
"""

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Annotated, Any, ClassVar

from pydantic import Field

from paddle_vl.families.vlm.modeling.config import (
    HEAD_KEY,
    TOKEN_IDS,
    DenseText,
    Heads,
    Layers,
    RopeBase,
    Spread,
    TokenId,
    VisionConfig,
    VLConfig,
    Vocabulary,
    Width,
    text_rotary,
    tie_settings,
    tower_section,
    typed_section,
)
from paddle_vl.files.stored_settings import (
    INERT_KEYS,
    Listed,
    Number,
    check_mapping,
    checked,
    known_values,
)
from paddle_vl.files.text_file import shown

_TYPE = "paddleocr_vl"
_Side = Annotated[int, Field(ge=1, le=1 << 16)]
# What a file may say of the decoder and of the tower, and the only values that models have.
_ONLY_TEXT: dict[str, Any] = {
    "attention_probs_dropout_prob": 0.0,
    "compression_ratio": 1.0,
    "hidden_act": "silu",
    "hidden_dropout_prob": 0.0,
    "ignored_index": -100,
    "max_sequence_length": None,
    "rope_is_neox_style": True,
    "sliding_window": None,
    "use_3d_rope": True,
}
_ONLY_VISION: dict[str, Any] = {"attention_dropout": 0.0, "num_channels": 3}
# Keys without effect on a model's numbers, as the hub's files have them.
_INERT_TEXT: dict[str, Any] = {
    "use_cache": False,
    "use_flash_attention": False,
    "weight_share_add_bias": True,
}
_INERT_VISION: dict[str, Any] = {"temporal_patch_size": 2, "tokens_per_second": 2}
# The tower's names in a file, and those of `VisionConfig`.
_TOWER = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
_TOWER_SIZES = ("hidden_size", "intermediate_size", "image_size", "patch_size", *_TOWER)


@checked
class PaddleOCRTextConfig(DenseText):
    """The decoder. Sizes have no defaults."""

    vocab_size: Vocabulary
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads
    head_dim: Annotated[int, Field(ge=2, le=8192)]
    rms_norm_eps: Annotated[Number, Field(gt=0, le=1)]
    rope_theta: RopeBase
    mrope_section: Listed[list[Annotated[int, Field(ge=1)]]]
    """channel pairs of a head that follow time, height and width, one after the other"""
    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 40)]
    pad_token_id: TokenId | None = 0
    """the token whose embedding gets no gradient"""
    use_bias: bool = False
    """whether the linears of the layers have biases, which no published model has"""
    initializer_range: Spread = 0.02
    mrope_interleaves: ClassVar[bool] = False

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        sections = self.mrope_section
        if len(sections) != 3 or 2 * sum(sections) != self.head_dim:
            raise ValueError(
                f"mrope_section is {sections}; it must be three numbers, for time, height and "
                f"width, whose sum is half of head_dim {self.head_dim}"
            )

    @property
    def padding_idx(self) -> int | None:
        return self.pad_token_id


@checked
class PaddleOCRVisionConfig(VisionConfig):
    """The vision tower, of images alone: a patch has one frame."""

    temporal_patch_size: Annotated[int, Field(ge=1, le=1)] = 1
    deepstack_visual_indexes: Annotated[Listed[list[int]], Field(max_length=0)] = Field(default=[])
    image_size: _Side = 384
    """side of the pictures that the table of positions was made for, in pixels"""
    layer_norm_eps: Annotated[Number, Field(gt=0, le=1)] = 1e-6
    vision_use_head: bool = field(default=True, compare=False)
    """whether the checkpoint has a pooling head, which nothing reads"""
    aligns_corners: ClassVar[bool] = False


@checked
class PaddleOCRVLConfig(VLConfig):
    """Configuration of the complete model."""

    embedding_key: ClassVar[str] = "model.embed_tokens.weight"

    text_config: PaddleOCRTextConfig
    vision_config: PaddleOCRVisionConfig = field(default_factory=PaddleOCRVisionConfig)

    def tied_by(self, stored: Mapping[str, Any]) -> "PaddleOCRVLConfig":
        # The hub's files say false, also where both tensors are equal.
        head, embedding = stored.get(HEAD_KEY), stored.get(self.embedding_key)
        tie = head is None or embedding is None or head.has_values_of(embedding)
        return self.with_tie(tie)

    @classmethod
    def named(cls, name: str) -> "PaddleOCRVLConfig":
        """The configuration of a published size: `paddleocr-vl-1.5`, or `PaddleOCR-VL-1.5`.

        Raises:
            ValueError: there is no such size.
        """
        from paddle_vl.families.paddleocr_vl.sizes import size_values

        return cls.from_dict(size_values(name))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PaddleOCRVLConfig":
        """Build from the content of a config.json, in either dialect.

        Raises:
            ValueError: another model type, unknown keys, or values missing or out of range.
        """
        values = check_mapping(values, "the configuration")
        if (model_type := values.get("model_type", _TYPE)) != _TYPE:
            raise ValueError(f"model_type is {shown(model_type)}; {_TYPE!r} is needed")
        text = _decoder_values(values)
        vision = check_mapping(values.pop("vision_config", None), "vision_config")
        ties = tie_settings(values, text)
        for name in TOKEN_IDS:
            if name not in values:
                raise ValueError(f"{name} is missing: programs assume different tokens; set it")
        text |= text_rotary(text, "mrope_section", interleaves=False)
        text = _without(text, _ONLY_TEXT, "text_config")
        vision = _tower_values(vision, text.get("hidden_size"))
        known, _ = known_values(cls, values, INERT_KEYS, "a configuration of PaddleOCR-VL")
        inert_text = (INERT_KEYS | _INERT_TEXT.keys()) - {"pad_token_id"}
        types = (f"{_TYPE}_text", _TYPE), (f"{_TYPE}_vision", _TYPE)
        sections = {
            "text_config": typed_section(
                PaddleOCRTextConfig, text, "text_config", types[0], inert_text
            ),
            "vision_config": typed_section(
                PaddleOCRVisionConfig, vision, "vision_config", types[1], INERT_KEYS
            ),
        }
        whole: dict[str, Any] = known | sections | ties | {"tie_flags_agree": True}
        return cls(**whole)

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json in the hub's dialect. Its tie flag is false, as there: where
        both are one, the files hold head and embedding with equal values. There is no `auto_map`:
        programs that are told to trust it would look for code that is not in the folder."""
        text, vision = self.text_config, self.vision_config
        decoder = {each.name: getattr(text, each.name) for each in fields(text)}
        section = list(decoder.pop("mrope_section"))
        tower = {name: getattr(vision, _TOWER.get(name, name)) for name in _TOWER_SIZES}
        if not vision.vision_use_head:
            tower["vision_use_head"] = False
        return {
            "architectures": ["PaddleOCRVLForConditionalGeneration"],
            "model_type": _TYPE,
            **decoder,
            **_ONLY_TEXT,
            **_INERT_TEXT,
            "rope_scaling": {
                "mrope_section": section,
                "rope_type": "default",
                "type": "default",
            },
            **{name: getattr(self, name) for name in TOKEN_IDS},
            "tie_word_embeddings": False,
            "vision_config": {
                "architectures": ["PaddleOCRVisionModel"],
                "model_type": _TYPE,
                **tower,
                "hidden_act": vision.hidden_act,
                "initializer_range": vision.initializer_range,
                "layer_norm_eps": vision.layer_norm_eps,
                "spatial_merge_size": vision.spatial_merge_size,
                **_ONLY_VISION,
                **_INERT_VISION,
            },
        }


def _decoder_values(values: dict[str, Any]) -> dict[str, Any]:
    """The decoder's values of a config.json, which loses those beside the model's.

    Raises:
        ValueError: a key is in both places, with different values.
    """
    names = {each.name for each in fields(PaddleOCRTextConfig)} | {"rope_scaling"}
    names |= _ONLY_TEXT.keys() | _INERT_TEXT.keys()
    flat = {name: values.pop(name) for name in sorted(names & values.keys())}
    if "text_config" not in values:
        return flat
    nested = check_mapping(values.pop("text_config"), "text_config")
    for name, value in flat.items():
        if name not in _INERT_TEXT and nested.setdefault(name, value) != value:
            raise ValueError(
                f"{name} is {shown(value)}, but {shown(nested[name])} in text_config: keep the "
                "right one"
            )
    return nested


def _without(values: dict[str, Any], only: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A section without the keys that have one value in all models.

    Raises:
        ValueError: one of them has another.
    """
    for name, needed in only.items():
        if values.get(name, needed) != needed:
            raise ValueError(
                f"{where}: {name} is {shown(values[name])}; only {shown(needed)} is supported, "
                "which the published models have"
            )
    return {name: value for name, value in values.items() if name not in only}


def _tower_values(vision: dict[str, Any], width: Any) -> dict[str, Any]:
    """The tower's section under the names of `PaddleOCRVisionConfig`.

    Raises:
        ValueError: a size is missing, or what all models have in common is different.
    """
    for name in (*_TOWER_SIZES, "spatial_merge_size"):
        if name not in vision:
            raise ValueError(f"vision_config: {name} is missing: programs assume different sizes")
    vision = _without(vision, _ONLY_VISION, "vision_config")
    vision = {name: value for name, value in vision.items() if name not in _INERT_VISION}
    vision = tower_section(vision)
    values = {_TOWER.get(name, name): value for name, value in vision.items()}
    sides = [values["image_size"], values["patch_size"]]
    if all(isinstance(side, int) and side > 0 for side in sides):
        values["num_position_embeddings"] = (sides[0] // sides[1]) ** 2
    return values | {"out_hidden_size": width}
