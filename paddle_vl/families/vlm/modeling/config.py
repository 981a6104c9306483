"""Configuration that vision-language models share: the vision tower, and what they have besides
their decoders.

Source: Qwen3VLVisionConfig and Qwen3VLConfig of HF transformers.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from paddle_vl.files.stored_settings import (
    INERT_KEYS,
    Listed,
    Number,
    SavedConfig,
    check_mapping,
    checked,
    known_values,
    read_section,
)
from paddle_vl.files.text_file import shown
from paddle_vl.nn.operations import ACTIVATIONS

C = TypeVar("C", bound="VLConfig")
T = TypeVar("T")
# Far beyond every published model; larger values are typing errors and would exhaust memory.
Layers = Annotated[int, Field(ge=1, le=1024)]
Width = Annotated[int, Field(ge=1, le=1 << 20)]
Heads = Annotated[int, Field(ge=1, le=4096)]
Vocabulary = Annotated[int, Field(ge=1, le=1 << 24)]
Spread = Annotated[Number, Field(ge=0, le=100)]
RopeBase = Annotated[Number, Field(gt=1)]
TokenId = Annotated[int, Field(ge=0)]
_Merged = Annotated[int, Field(ge=1, le=64)]
# HF's keys of the output head and of the token embedding.
HEAD_KEY = "lm_head.weight"
EMBEDDING_KEY = "model.language_model.embed_tokens.weight"
TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@checked
class VisionConfig:
    """The vision tower. Defaults are those of HF's configuration class."""

    depth: Layers = 27
    hidden_size: Width = 1152
    intermediate_size: Width = 4304
    num_heads: Heads = 16
    hidden_act: str = "gelu_pytorch_tanh"
    # Red, green and blue.
    in_channels: Annotated[int, Field(ge=3, le=3)] = 3
    patch_size: Annotated[int, Field(ge=1, le=256)] = 16
    temporal_patch_size: _Merged = 2
    spatial_merge_size: _Merged = 2
    out_hidden_size: Width = 3584
    num_position_embeddings: Vocabulary = 2304
    initializer_range: Spread = 0.02
    deepstack_visual_indexes: Listed[list[TokenId]] = field(default_factory=lambda: [8, 16, 24])
    rope_theta: RopeBase = 10000.0
    # Of the table of learned positions and a frame, the corners coincide; False: the edges.
    aligns_corners: ClassVar[bool] = True

    def __post_init__(self):
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act is {shown(self.hidden_act)}; choose one of {', '.join(ACTIVATIONS)}"
            )
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 4:
            raise ValueError(
                f"hidden_size {self.hidden_size} over num_heads {self.num_heads} "
                "must give a head width that is a multiple of 4"
            )
        if self.table_side**2 != self.num_position_embeddings:
            raise ValueError(
                f"num_position_embeddings {self.num_position_embeddings} is not a square number"
            )
        if outside := [i for i in self.deepstack_visual_indexes if i >= self.depth]:
            raise ValueError(
                f"deepstack_visual_indexes {outside} lie outside the tower's {self.depth} blocks"
            )
        if list(self.deepstack_visual_indexes) != sorted(set(self.deepstack_visual_indexes)):
            raise ValueError(
                f"deepstack_visual_indexes {self.deepstack_visual_indexes} must "
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


class DenseText:
    """What the configuration of a decoder without experts answers.

    Attributes:
        mrope_interleaves: see `paddle_vl.nn.attention.mrope_tables`.
        padding_idx: the token whose embedding gets no gradient, None for none.
        use_bias: whether the linears of the decoder's layers have biases.
    """

    mrope_interleaves: ClassVar[bool] = True
    padding_idx: int | None = None
    use_bias: bool = False

    def has_experts(self, layer: int) -> bool:
        """Whether that decoder layer has experts instead of an MLP."""
        return False

    def has_balance_loss(self, requested: bool | None) -> bool:
        """Whether a call computes the load-balancing loss; None leaves it to the configuration.

        Raises:
            ValueError: it is requested of a model without experts.
        """
        if requested:
            raise ValueError(
                "output_router_logits is true but this model has no experts: leave it out"
            )
        return False


class ExpertsText:
    """What the configuration of a decoder with experts answers; before the dense one's class."""

    num_experts: int
    num_experts_per_tok: int
    output_router_logits: bool

    def check_experts(self) -> None:
        """Raise a ValueError if a token goes to more experts than there are."""
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}; it must be at most "
                f"num_experts {self.num_experts}"
            )

    def has_balance_loss(self, requested: bool | None) -> bool:
        return self.output_router_logits if requested is None else requested


@checked
class VLConfig(SavedConfig):
    """Configuration of a complete model.

    A family adds `text_config`, its decoder's, which has at least `vocab_size`, `hidden_size`,
    `num_hidden_layers`, `rope_theta`, `mrope_section`, `initializer_range`, `rms_norm_eps` and what
    `DenseText` answers; with experts also `num_experts` and `router_aux_loss_coef`; and what
    `layer_size` reads.
    """

    file_name: ClassVar[str] = "config.json"
    what: ClassVar[str] = "a model's configuration"
    # Key of the token embedding in a checkpoint.
    embedding_key: ClassVar[str] = EMBEDDING_KEY

    text_config: Any
    vision_config: VisionConfig = field(default_factory=VisionConfig)
    image_token_id: TokenId = 151655
    video_token_id: TokenId = 151656
    vision_start_token_id: TokenId = 151652
    vision_end_token_id: TokenId = 151653
    tie_word_embeddings: bool = False
    """whether head and embedding share their weight"""
    tie_flags_agree: bool = field(default=True, compare=False, repr=False)
    """False if the file's two tie flags disagree or one is missing; then the presence of
    lm_head.weight in the checkpoint decides"""

    def __post_init__(self):
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
        ids = {name: getattr(self, name) for name in TOKEN_IDS}
        for name, token in ids.items():
            if token >= text.vocab_size:
                raise ValueError(
                    f"{name} {token} lies outside text_config.vocab_size {text.vocab_size}"
                )
        if len(set(ids.values())) < len(ids):
            raise ValueError(f"{ids} must be four different tokens")

    def layer_size(self, layer: int) -> int:
        """Multiplications per token of the matrix products of that decoder layer.

        Attention scores are left out, because they cost the same in every layer.
        """
        from paddle_vl.families.vlm.modeling.flops import VLFlops

        return VLFlops.layer_size(self, layer)

    @classmethod
    def named(cls: type[C], name: str) -> C:
        """The configuration of a published size.

        Raises:
            ValueError: there is no such size.
        """
        raise ValueError(f"{name!r}: this family has no published sizes; give a config.json")

    def with_tie(self: C, tie: bool) -> C:
        """A copy with this tie flag."""
        return replace(self, tie_word_embeddings=tie, tie_flags_agree=True)

    def tied_by(self: C, stored: Mapping[str, Any]) -> C:
        """This configuration of a checkpoint with these tensors, which decide whether head and
        embedding share their weight where the flags do not."""
        return self if self.tie_flags_agree else self.with_tie(HEAD_KEY not in stored)


def size_name(
    name: str, sizes: Collection[str], family: str, example: str, owner: str = "qwen"
) -> str:
    """A published size by its name, or by that of a model on the hub: `Qwen/Qwen3.5-4B` and
    `Qwen3.5-4B-Base` are `qwen3.5-4b`. The case of letters is ignored.

    Args:
        owner: of the models on the hub.

    Raises:
        ValueError: there is no such size.
    """
    plain = name.lower().removeprefix(f"{owner}/")
    for ending in ("-base", "-instruct", "-thinking"):
        plain = plain.removesuffix(ending)
    if plain not in sizes:
        raise ValueError(
            f"{name!r} is not a size of {family}; use one of {', '.join(sizes)}, or a name of the "
            f"hub like {example}"
        )
    return plain


def check_interleaves(mrope_section: list[int]) -> None:
    """Check that axes of these sizes can be interleaved as time, height, width, time, ...

    Raises:
        ValueError: they cannot.
    """
    slots = sum(mrope_section)
    fits = [not axis or 3 * (count - 1) + axis < slots for axis, count in enumerate(mrope_section)]
    if len(fits) != 3 or not all(fits):
        raise ValueError(
            f"mrope_section {mrope_section} must be three numbers, for time, height and width, "
            "that can be interleaved: the last two at most a third of their sum, rounded up"
        )


def rotary_settings(
    values: dict[str, Any],
    where: str,
    names: Sequence[str],
    kinds: Sequence[str] = ("default",),
    interleaves: bool = True,
) -> dict[str, Any]:
    """The settings of rotary positions in a section of a config.json, which loses them: of
    `rope_scaling`, `rope_parameters`, or beside these. Null is no setting.

    Args:
        names: settings that there are, beside the type and `mrope_interleaved`.
        kinds: types of rotary positions that mean the same here.
        interleaves: what `mrope_interleaved` is, where it is given.

    Raises:
        ValueError: other settings, another type, or two values of one setting.
    """
    rope, names = dict[str, Any](), (*names, "rope_type", "mrope_interleaved")
    for place in ("rope_parameters", "rope_scaling"):
        found = check_mapping(values.pop(place, None), f"{where}: {place}")
        if "type" in found:
            found.setdefault("rope_type", found.pop("type"))
        if unknown := sorted(found.keys() - set(names)):
            raise ValueError(
                f"{where}: the rotary parameters have {', '.join(unknown)}, with which positions "
                f"would be scaled: only rope_type {kinds[0]!r} is supported"
            )
        # transformers 5.24 takes rope_scaling then, whole.
        found = {name: value for name, value in found.items() if value is not None}
        if rope and found and found != rope:
            raise ValueError(
                f"{where}: rope_parameters {shown(rope)} and rope_scaling {shown(found)} differ: "
                "keep the right one"
            )
        rope |= found
    for name in names:
        beside = values.pop(name, None)
        if beside is not None and rope.setdefault(name, beside) != beside:
            raise ValueError(
                f"{where}: {name} is {shown(beside)} but in the rotary parameters "
                f"{shown(rope[name])}: both must be equal; keep the right one"
            )
    kind, interleaved = rope.pop("rope_type", kinds[0]), rope.pop("mrope_interleaved", interleaves)
    if kind not in kinds or interleaved is not interleaves:
        raise ValueError(
            f"{where}: rope_type is {shown(kind)} and mrope_interleaved {shown(interleaved)}; only "
            f"{kinds[0]!r} and {str(interleaves).lower()} are supported"
        )
    return rope


def text_rotary(text: dict[str, Any], *names: str, interleaves: bool = True) -> dict[str, Any]:
    """`rotary_settings` of a decoder, with `rope_theta`.

    Raises:
        ValueError: as there; or there is no `rope_theta`.
    """
    names = ("rope_theta", *names)
    rope = rotary_settings(text, "text_config", names, interleaves=interleaves)
    if "rope_theta" not in rope:
        # transformers 5.24 takes 500000 (Qwen3-VL) or 10000; published are 5000000 and 10000000.
        raise ValueError(
            "text_config: rope_theta is missing, beside and in rope_scaling or rope_parameters, "
            "and programs assume different values: set it to that of the model's own config.json"
        )
    return rope


def tower_section(vision: dict[str, Any]) -> dict[str, Any]:
    """The tower's section of a config.json with `rope_theta`, from either dialect; its positions
    are axial. Raises what `rotary_settings` does."""
    return vision | rotary_settings(vision, "vision_config", ("rope_theta",), ("axial", "default"))


def typed_section(
    cls: type[T],
    values: dict[str, Any],
    where: str,
    types: Sequence[str],
    inert: frozenset[str] = INERT_KEYS,
) -> T:
    """A section of a config.json; keys without effect are left out.

    Args:
        types: values of `model_type` that the section may have.
        inert: keys without effect.

    Raises:
        ValueError: another model type, unknown keys, or values out of range.
    """
    if (found := values.get("model_type", types[0])) not in types:
        raise ValueError(f"{where}: model_type is {shown(found)}; expected one of {tuple(types)}")
    known, _ = known_values(cls, values, inert, f"{where} of {types[0]}")
    return read_section(cls, known, where)


def tie_settings(values: dict[str, Any], text: dict[str, Any]) -> dict[str, bool]:
    """The two tie settings of a `VLConfig` from a config.json and its text section, which lose
    theirs.

    Raises:
        ValueError: a flag is not true or false.
    """
    # transformers 5.x reads the top-level flag, 4.57 that of text_config.
    flags = [values.pop("tie_word_embeddings", None), text.pop("tie_word_embeddings", None)]
    for where, flag in zip(("", "text_config: "), flags, strict=True):
        if flag is not None and not isinstance(flag, bool):
            raise ValueError(
                f"{where}tie_word_embeddings is {shown(flag)}; it must be true or false"
            )
    return {
        "tie_word_embeddings": bool(flags[1] if flags[0] is None else flags[0]),
        "tie_flags_agree": flags[0] == flags[1],
    }
