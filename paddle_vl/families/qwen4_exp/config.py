"""Configuration of Qwen4-Exp; see `paddle_vl.families.vlm.modeling.delta_config`.

Of attention layers the hub's files say full_attention, transformers 5.16 to 5.23
qwen_sparse_attention, and 5.24 indexed_attention. All are read; the first is written, which every
program reads.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar

from pydantic import Field

from paddle_vl.families.vlm.modeling.config import RopeBase, VisionConfig, Width
from paddle_vl.families.vlm.modeling.delta_config import (
    FULL,
    DeltaConfig,
    DeltaExpertsText,
    DeltaText,
)
from paddle_vl.files.stored_settings import Listed, Number, checked
from paddle_vl.files.text_file import shown
from paddle_vl.nn.ngram_embedding import NgramHash, ngram_hash

# Earlier exports have the model's name as its type.
_TYPE, _EARLY_TYPE = "qwen4_exp", "qwen3_8_flash_next"
_SAME_LAYERS: dict[str, str] = dict.fromkeys(("indexed_attention", "qwen_sparse_attention"), FULL)
_GATES = ("silu", "sigmoid")
_INDEXER = (
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)
# The table of a quantized model has a dtype of its own.
_ONLY = {**DeltaText.only, "ple_embedding_dtype": ("bfloat16", "float16", "float32")}
_Positive = Annotated[int, Field(ge=1, le=1 << 24)]
_Few = Annotated[int, Field(ge=1, le=64)]


@checked
class Qwen4ExpTextConfig(DeltaExpertsText):
    """The decoder. Defaults are those of HF's configuration class."""

    # Derived by transformers, which writes it too.
    inert = DeltaText.inert | {"number_of_conv_states"}
    only = _ONLY
    optional = (*DeltaText.optional, "ple_layer_ids", "ple_embed_dim")

    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 40)] = 32768
    rope_theta: RopeBase = 10000.0
    partial_rotary_factor: Annotated[Number, Field(gt=0, le=1)] = 1.0
    num_experts: Annotated[int, Field(ge=1, le=1 << 16)] = 512
    num_experts_per_tok: Annotated[int, Field(ge=1)] = 10
    norm_topk_prob: bool = True
    """divide the weights of a token's experts by their sum"""
    output_gate_type: str | None = None
    """of a delta rule's output, silu or sigmoid; None for silu"""
    hc_count: Annotated[int, Field(ge=2, le=64)] = 4
    """residual streams"""
    hc_lowrank: Width = 320
    """inner width of the gate that reads the streams"""
    indexer_n_heads: _Positive | None = None
    """heads of a query that score blocks of keys; None: no layer has attention"""
    indexer_kv_heads: Annotated[int, Field(ge=1, le=1)] | None = None
    indexer_head_dim: _Positive | None = None
    indexer_budget: _Positive | None = None
    """tokens of the blocks that a query attends to, beside the unfinished block"""
    indexer_compress_ratio: _Positive | None = None
    """tokens of a block"""
    ple_layer_ids: Listed[list[int]] = field(default_factory=list)
    """numbers from 1 of the layers that get embeddings of n-grams, with a delta rule each"""
    ple_embed_dim: Width = 0
    """channels of the embeddings of all n-grams that end at a token; hidden_size by default"""
    ple_conv_kernel_size: Annotated[int, Field(ge=2, le=64)] = 4
    ngram_size: _Few = 3
    """tokens of the longest n-gram"""
    heads_per_ngram: Annotated[int, Field(ge=1, le=4096)] = 8
    """hashes, each with an embedding, of the n-grams of one length"""
    ngram_vocab_size_base: Annotated[int, Field(ge=1, le=1 << 32)] = 20000000
    """least number of rows of a hash"""
    make_ngram_vocab_size_divisible_by: _Positive = 128
    seed: Annotated[int, Field(ge=0)] = 1234
    split_ngram_parts: Annotated[int, Field(ge=1, le=1 << 16)] = 512
    """tensors of a table in the files that are written"""
    pad_token_id: Annotated[int, Field(ge=0)] | None = None
    bos_token_id: Any = None
    eos_token_id: Any = None
    """a token, or several; n-grams begin behind the first of them"""
    hashes: Any = field(default=None, compare=False, repr=False)
    """`NgramHash` of layers, by their numbers from 0, of a checkpoint; None: of these settings"""

    def __post_init__(self):
        types = [_SAME_LAYERS.get(each, each) for each in self.layer_types]
        object.__setattr__(self, "layer_types", types)
        super().__post_init__()
        if (self.output_gate_type or _GATES[0]) not in _GATES:
            raise ValueError(
                f"output_gate_type is {shown(self.output_gate_type)}; only "
                f"{' or '.join(map(repr, _GATES))} is supported"
            )
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"pad_token_id {self.pad_token_id} lies outside vocab_size {self.vocab_size}"
            )
        self._check_indexer()
        ids = sorted(set(self.ple_layer_ids))
        object.__setattr__(self, "ple_layer_ids", ids)
        if not self.ple_embed_dim:
            object.__setattr__(self, "ple_embed_dim", self.hidden_size)
        if ids:
            self._check_ngrams()

    def _check_indexer(self) -> None:
        given = {name: getattr(self, name) for name in _INDEXER}
        missing = [name for name, value in given.items() if value is None]
        if missing == list(_INDEXER):
            if FULL in self.layer_types:
                raise ValueError(
                    f"layer_types has attention layers, but {', '.join(_INDEXER)} are missing: "
                    "attention without an indexer is not defined; take them from the model's own "
                    "config.json"
                )
            return
        if missing:
            raise ValueError(
                f"{', '.join(missing)} must be given beside "
                f"{', '.join(f'{k} {v}' for k, v in given.items() if v is not None)}"
            )
        budget, ratio, width = (given[name] for name in (*_INDEXER[3:], _INDEXER[2]))
        if budget % ratio:
            raise ValueError(
                f"indexer_budget {budget} is not a multiple of indexer_compress_ratio {ratio}"
            )
        if self.rotary_dim > width:
            raise ValueError(
                f"indexer_head_dim {width} is below the {self.rotary_dim} rotated channels, "
                f"head_dim {self.head_dim} x partial_rotary_factor {self.partial_rotary_factor}"
            )

    def _check_ngrams(self) -> None:
        if outside := [n for n in self.ple_layer_ids if not 1 <= n <= self.num_hidden_layers]:
            raise ValueError(
                f"ple_layer_ids {outside} lie outside the decoder's layers, 1 to "
                f"{self.num_hidden_layers}"
            )
        if full := [n for n in self.ple_layer_ids if self.is_full(n - 1)]:
            raise ValueError(
                f"ple_layer_ids {full} are attention layers: n-grams are embedded for layers of "
                "the type 'linear_attention' only"
            )
        if self.ngram_size < 2:
            raise ValueError(
                f"ngram_size is {self.ngram_size}; it must be at least 2 where ple_layer_ids are "
                "given"
            )
        if self.ple_embed_dim % self.ngram_heads:
            raise ValueError(
                f"ple_embed_dim {self.ple_embed_dim} is not a multiple of the {self.ngram_heads} "
                f"hashes, (ngram_size {self.ngram_size} - 1) x heads_per_ngram "
                f"{self.heads_per_ngram}"
            )
        tokens = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        if not tokens or not all(
            type(token) is int and 0 <= token < self.vocab_size for token in tokens
        ):
            raise ValueError(
                f"eos_token_id is {shown(self.eos_token_id)}; where ple_layer_ids are given it "
                f"must be a token below vocab_size {self.vocab_size}, or a list of such: n-grams "
                "begin behind it"
            )

    @property
    def padding_idx(self) -> int | None:
        return self.pad_token_id

    @property
    def output_gate(self) -> str:
        """What is applied to the gate of a delta rule's output, silu or sigmoid."""
        return self.output_gate_type or _GATES[0]

    @property
    def ngram_heads(self) -> int:
        """Hashes of the n-grams that end at a token, each with a row of the table."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ngram_boundary(self) -> int:
        """The token behind which n-grams begin."""
        tokens = self.eos_token_id
        return tokens[0] if isinstance(tokens, list) else tokens

    def has_ngrams(self, layer: int) -> bool:
        """Whether that layer, counted from 0, gets embeddings of n-grams."""
        return layer in self.ngram_layers

    @property
    def ngram_layers(self) -> list[int]:
        """The layers, counted from 0, that get embeddings of n-grams."""
        return [number - 1 for number in self.ple_layer_ids]

    @property
    def ngram_width(self) -> int:
        """Numbers in a row of a table."""
        return self.ple_embed_dim // self.ngram_heads

    def num_ngram_rows(self, layer: int) -> int:
        """Rows of that layer's table."""
        return self._hash(layer).num_rows(self.make_ngram_vocab_size_divisible_by)

    @property
    def table_rows(self) -> list[int]:
        """Rows of every table."""
        return [self.num_ngram_rows(layer) for layer in self.ngram_layers]

    def ngram_hash(self, layer: int) -> NgramHash:
        """The hash of that layer: a checkpoint's, or that of these settings."""
        return (self.hashes or {}).get(layer) or self._hash(layer)

    def _hash(self, layer: int) -> NgramHash:
        return ngram_hash(
            self.ngram_layers.index(layer),
            self.ngram_size,
            self.heads_per_ngram,
            self.vocab_size,
            self.ngram_vocab_size_base,
            self.seed,
        )

    def written(self) -> dict[str, Any]:
        text = super().written() | {"number_of_conv_states": 3 if self.ple_layer_ids else 1}
        text.pop("hashes")
        return text


def _tower() -> VisionConfig:
    return VisionConfig(deepstack_visual_indexes=[])


@checked
class Qwen4ExpConfig(DeltaConfig):
    """Configuration of the complete model."""

    family: ClassVar[str] = "Qwen4-Exp"
    text_classes: ClassVar[Mapping[str, type[DeltaText]]] = {_TYPE: Qwen4ExpTextConfig}

    text_config: Qwen4ExpTextConfig
    vision_config: VisionConfig = field(default_factory=_tower)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Qwen4ExpConfig":
        if isinstance(values, Mapping):
            values = {
                name: _renamed(value) if name.endswith("_config") else value
                for name, value in _renamed(values).items()
            }
        return super().from_dict(values)

    def layer_size(self, layer: int) -> int:
        from paddle_vl.families.qwen4_exp.flops import Qwen4ExpFlops

        return Qwen4ExpFlops.layer_size(self, layer)

    @classmethod
    def named(cls, name: str) -> "Qwen4ExpConfig":
        """The configuration of a published size, `qwen3.8-flash-next`.

        Raises:
            ValueError: there is no such size.
        """
        from paddle_vl.families.qwen4_exp.sizes import size_values

        return cls.from_dict(size_values(name))

    def to_dict(self) -> dict[str, Any]:
        return self.written("Qwen4Exp", _TYPE)


def _renamed(values: Any) -> Any:
    """A section of an earlier export, with today's type."""
    kind = values.get("model_type") if isinstance(values, Mapping) else None
    if isinstance(kind, str) and kind.startswith(_EARLY_TYPE):
        return {**values, "model_type": _TYPE + kind.removeprefix(_EARLY_TYPE)}
    return values
