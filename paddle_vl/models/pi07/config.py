"""Configuration of pi07: the numbers of the engine under the field names of OpenTau.

A policy's configuration holds `vlm_config`, the engine's, which holds the two towers'. Some
settings stand at both levels: given at one they hold for both, given at both they must agree.
"""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Settings that stand in the policy's configuration and in `vlm_config`, with their defaults.
SHARED_SETTINGS: dict[str, Any] = {
    "attention_implementation": "eager",
    "dropout": 0.1,
    "freeze_vision_encoder": True,
    "train_expert_only": False,
    "train_state_action_representation_only": False,
    "gradient_checkpointing": False,
}
ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa")

# Keys of HF's configuration classes without effect on the numbers here. The original ignores
# `rope_scaling` and `sliding_window` too: see `paddle_vl.models.pi07.interleaved`.
_INERT_KEYS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path
    _sliding_window_pattern add_cross_attention architectures attention_bias attention_dropout
    attn_logit_softcapping auto_map bad_words_ids begin_suppress_tokens boi_token_index bos_token_id
    cache_implementation chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eoi_token_index
    eos_token_id exponential_decay_length_penalty final_logit_softcapping finetuning_task
    forced_bos_token_id forced_eos_token_id head_dtype hidden_act hidden_activation id2label
    ignore_index image_token_id image_token_index initializer_range is_decoder is_encoder_decoder
    label2id length_penalty max_length max_position_embeddings min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_channels num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix problem_type
    projection_dim projector_hidden_act pruned_heads remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate rope_scaling sep_token_id sliding_window
    sliding_window_pattern suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p use_bfloat16 use_bidirectional_attention use_cache
    vision_use_head
    """.split()
)


def build_part(cls: type, values: dict[str, Any], where: str):
    """`cls` from a part of a config.json.

    Raises:
        ValueError: a key that is neither a field nor known to be without effect.
    """
    names = {f.name for f in fields(cls)}
    unknown = sorted(set(values) - names - _INERT_KEYS)
    if unknown:
        raise ValueError(
            f"{where} has keys that this model does not know: {unknown}; remove them, or check "
            "that the file belongs to a pi07 policy"
        )
    return cls(**{name: value for name, value in values.items() if name in names})


@dataclass(frozen=True)
class SiglipVisionConfig:
    """The image tower. Defaults are those of the original."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_attention_heads: int = 16
    num_hidden_layers: int = 27
    patch_size: int = 14
    image_size: int = 448
    layer_norm_eps: float = 1e-6

    def __post_init__(self):
        _check_divides(self, "vision_config", "hidden_size", "num_attention_heads")
        _check_divides(self, "vision_config", "image_size", "patch_size")

    @property
    def grid_side(self) -> int:
        """Patches of an image in one direction."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.grid_side**2


@dataclass(frozen=True)
class Gemma3TextConfig:
    """The backbone. `layer_types` defaults to one full layer behind every five sliding ones."""

    hidden_size: int = 2560
    intermediate_size: int = 10240
    num_hidden_layers: int = 34
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    query_pre_attn_scalar: float = 256
    rope_theta: float = 1e6
    rope_local_base_freq: float = 1e4
    rms_norm_eps: float = 1e-6
    vocab_size: int = 262208
    layer_types: list[str] | None = None

    def __post_init__(self):
        _check_divides(self, "text_config", "num_attention_heads", "num_key_value_heads")
        if self.layer_types is None:
            kinds = [
                "sliding_attention" if (i + 1) % 6 else "full_attention"
                for i in range(self.num_hidden_layers)
            ]
            object.__setattr__(self, "layer_types", kinds)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"text_config: layer_types names {len(self.layer_types)} layers, "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )

    def rope_base(self, layer: int) -> float:
        """Base of the rotary angles of a layer, for both streams."""
        is_local = self.layer_types[layer] == "sliding_attention"
        return self.rope_local_base_freq if is_local else self.rope_theta


@dataclass(frozen=True)
class Gemma3Config:
    """Backbone, image tower and the projector between them."""

    text_config: Gemma3TextConfig = field(default_factory=Gemma3TextConfig)
    vision_config: SiglipVisionConfig = field(default_factory=SiglipVisionConfig)
    mm_tokens_per_image: int = 256

    def __post_init__(self):
        side = self.vision_config.grid_side
        if round(self.mm_tokens_per_image**0.5) ** 2 != self.mm_tokens_per_image or (
            side % round(self.mm_tokens_per_image**0.5)
        ):
            raise ValueError(
                f"mm_tokens_per_image is {self.mm_tokens_per_image}: it must be a square whose "
                f"side divides the {side} patches in a row of an image"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Gemma3Config":
        """From the content of `gemma3_config`."""
        values = dict(values)
        text = build_part(Gemma3TextConfig, values.pop("text_config", {}), "text_config")
        vision = build_part(SiglipVisionConfig, values.pop("vision_config", {}), "vision_config")
        values |= {"text_config": text, "vision_config": vision}
        return build_part(cls, values, "gemma3_config")


@dataclass(frozen=True)
class GemmaExpertConfig:
    """The action expert. Its heads are the backbone's; the original ignores its `rope_theta`."""

    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_hidden_layers: int = 34
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    use_adarms: bool = True
    adarms_cond_dim: int = 1280
    vocab_size: int = 262208


@dataclass(frozen=True)
class Gemma3WithExpertConfig:
    """The engine: backbone and expert, and which of their parameters train.

    Attributes:
        discrete_action_vocab_size: of the FAST tokenizer; None until one is there.
    """

    gemma3_config: Gemma3Config = field(default_factory=Gemma3Config)
    gemma_expert_config: GemmaExpertConfig = field(default_factory=GemmaExpertConfig)
    attention_implementation: str | None = None
    dropout: float | None = None
    freeze_vision_encoder: bool | None = None
    train_expert_only: bool | None = None
    train_vision_encoder_only: bool = False
    train_state_action_representation_only: bool | None = None
    gradient_checkpointing: bool | None = None
    disable_action_expert: bool = False
    load_pretrained_gemma3: bool = False
    disable_internal_bf16_cast: bool = False
    discrete_action_vocab_size: int | None = None

    def __post_init__(self):
        text, expert = self.gemma3_config.text_config, self.gemma_expert_config
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
            if not self.disable_action_expert and getattr(text, name) != getattr(expert, name):
                raise ValueError(
                    f"gemma_expert_config.{name} {getattr(expert, name)} differs from "
                    f"text_config.{name} {getattr(text, name)}: both streams share every attention"
                )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Gemma3WithExpertConfig":
        """From the content of `vlm_config`."""
        values = dict(values)
        expert = values.pop("gemma_expert_config", {})
        values |= {
            "gemma3_config": Gemma3Config.from_dict(values.pop("gemma3_config", {})),
            "gemma_expert_config": build_part(GemmaExpertConfig, expert, "gemma_expert_config"),
        }
        return build_part(cls, values, "vlm_config")


@dataclass(frozen=True)
class PI07Config:
    """The low-level policy.

    After construction the settings of `SHARED_SETTINGS` have values at both levels, the same.
    """

    vlm_config: Gemma3WithExpertConfig = field(default_factory=Gemma3WithExpertConfig)
    n_obs_steps: int = 6
    history_interval: int = 1
    chunk_size: int = 50
    n_action_steps: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    prompt_max_length: int = 256
    response_max_length: int = 52
    metadata_max_length: int = 52
    discrete_action_max_length: int = 32
    proj_width: int = 1280
    num_steps: int = 5
    max_delay: int = 0
    per_group_projection: bool = False
    knowledge_insulation: bool = True
    spacetime_layer_stride: int = 4
    attention_implementation: str | None = None
    dropout: float | None = None
    freeze_vision_encoder: bool | None = None
    train_expert_only: bool | None = None
    train_state_action_representation_only: bool | None = None
    gradient_checkpointing: bool | None = None

    def __post_init__(self):
        self._settle_shared()
        self._check_freezing()
        width = self.vlm_config.gemma_expert_config.hidden_size
        if self.proj_width != width:
            raise ValueError(
                f"proj_width {self.proj_width} differs from gemma_expert_config.hidden_size {width}"
            )
        if self.attention_implementation not in ATTENTION_IMPLEMENTATIONS:
            raise ValueError(
                f"attention_implementation is {self.attention_implementation!r}; this package has "
                f"{ATTENTION_IMPLEMENTATIONS}"
            )
        if not self.n_action_steps <= self.chunk_size or not self.max_delay <= self.chunk_size:
            raise ValueError(
                f"n_action_steps {self.n_action_steps} and max_delay {self.max_delay} must not "
                f"exceed chunk_size {self.chunk_size}"
            )
        if self.n_action_steps < self.chunk_size and self.max_delay > 0:
            raise ValueError(
                f"max_delay {self.max_delay} needs n_action_steps {self.n_action_steps} to be "
                f"chunk_size {self.chunk_size}"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PI07Config":
        """From the content of config.json.

        Raises:
            ValueError: unknown keys, contradictory settings, named.
        """
        values = dict(values)
        vlm = Gemma3WithExpertConfig.from_dict(values.pop("vlm_config", {}))
        return build_part(cls, values | {"vlm_config": vlm}, "the configuration")

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        return asdict(self)

    def _settle_shared(self) -> None:
        for name, default in SHARED_SETTINGS.items():
            own, engine = getattr(self, name), getattr(self.vlm_config, name)
            if None not in (own, engine) and own != engine:
                raise ValueError(
                    f"{name} is {own} in the policy's configuration and {engine} in vlm_config: "
                    "give one of them, or the same value twice"
                )
            value = next((v for v in (own, engine) if v is not None), default)
            object.__setattr__(self, name, value)
            object.__setattr__(self.vlm_config, name, value)

    def _check_freezing(self) -> None:
        vlm = self.vlm_config
        refused = [
            ("train_expert_only", "without", "freeze_vision_encoder"),
            ("train_expert_only", "with", "disable_action_expert"),
            ("train_vision_encoder_only", "with", "train_expert_only"),
            ("train_vision_encoder_only", "with", "freeze_vision_encoder"),
            ("train_state_action_representation_only", "with", "train_expert_only"),
            ("train_state_action_representation_only", "with", "train_vision_encoder_only"),
        ]
        for first, how, second in refused:
            if getattr(vlm, first) and getattr(vlm, second) == (how == "with"):
                raise ValueError(f"{first} {how} {second}: these settings contradict each other")


def _check_divides(config, where: str, whole: str, part: str) -> None:
    if getattr(config, whole) % getattr(config, part):
        raise ValueError(
            f"{where}: {whole} {getattr(config, whole)} is not a multiple of {part} "
            f"{getattr(config, part)}"
        )
