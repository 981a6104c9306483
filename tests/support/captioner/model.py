"""The captioner's model, checkpoint map and pipeline stage.

Projected region features precede the caption's tokens. A causal decoder with learned positions
reads both and predicts the caption.

Axes: B batch, R regions, L padded caption length, T = B (R + L) token rows (this rank's shard of
them under sequence parallelism), D width, N query heads, K key heads, H head width, V vocabulary.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.checkpoint.reading import (
    Materializable,
    check_keys,
    checkpoint_tensors,
    drawn_values,
    stored_values,
)
from paddle_vl.checkpoint.rules import (
    LinearWeights,
    Rule,
    Same,
    StoredParameter,
    place_parameters,
)
from paddle_vl.checkpoint.safetensors_io import FileWriter, write_file
from paddle_vl.checkpoint.writing import save_parameters
from paddle_vl.nn.attention import causal_attention
from paddle_vl.nn.linear import Columns, Embedding, Linear, default_dtype, separate
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.norm import RMSNorm
from paddle_vl.nn.operations import next_token_targets, swiglu
from paddle_vl.nn.placement import Placement, SingleDevicePlacement
from tests.support.captioner.inputs import CaptionBatch

CHECKPOINT_RULES = (
    Rule("embed_tokens.weight", "captioner.embed_tokens.weight", Same()),
    Rule("positions.weight", "captioner.positions.weight", Same()),
    Rule("head.weight", "captioner.head.weight", Same()),
    Rule("*", "captioner.*", LinearWeights()),
)


@dataclass(frozen=True)
class CaptionerConfig:
    """Sizes of the model; `config.json` with `model_type: captioner`."""

    vocab_size: int
    num_regions: int = 4
    num_features: int = 6
    hidden_size: int = 16
    intermediate_size: int = 24
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    num_key_value_heads: int = 2
    max_positions: int = 64

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CaptionerConfig":
        return cls(**{name: value for name, value in values.items() if name != "model_type"})

    def save_pretrained(self, folder: Path) -> None:
        values = {"model_type": "captioner", **asdict(self)}
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")


class DecoderLayer(nn.Layer):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: CaptionerConfig, placement: Placement):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.head_dim = width // config.num_attention_heads
        key_width = config.num_key_value_heads * self.head_dim
        self.qkv_proj = placement.layers.projections(
            width,
            [
                Columns("q_proj", width, config.num_attention_heads),
                Columns("k_proj", key_width, config.num_key_value_heads),
                Columns("v_proj", key_width, config.num_key_value_heads),
            ],
            0.1,
        )
        self.o_proj = placement.layers.row_linear(width, width, 0.1)
        columns = [Columns("gate_proj", inner), Columns("up_proj", inner)]
        self.gate_up_proj = placement.layers.projections(width, columns, 0.1, splits=False)
        self.down_proj = placement.layers.row_linear(inner, width, 0.1)
        self.input_norm = placement.layers.row_wise(RMSNorm(width, 1e-6))
        self.mlp_norm = placement.layers.row_wise(RMSNorm(width, 1e-6))

    def forward(self, x_TD: Tensor, batch_size: int) -> Tensor:
        q, k, v = (
            rows.reshape([batch_size, -1, rows.shape[-1] // self.head_dim, self.head_dim])
            for rows in self.qkv_proj(self.input_norm(x_TD))
        )
        out_BSNH = causal_attention(q, k, v)
        x_TD = x_TD + self.o_proj(out_BSNH.reshape([-1, q.shape[2] * self.head_dim]))
        return x_TD + self.down_proj(swiglu(*self.gate_up_proj(self.mlp_norm(x_TD))))


class Captioner(Materializable, nn.Layer):
    """The model, or this rank's shard of it; see `paddle_vl.families.base.TrainableModel`."""

    def __init__(self, config: CaptionerConfig, placement: Placement | None = None):
        super().__init__()
        self.config, self.placement = config, placement or SingleDevicePlacement()
        placement, width = self.placement, config.hidden_size
        self.project = self.embed_tokens = self.positions = self.norm = self.head = None
        if placement.stage_layers.embedding:
            self.project = Linear(config.num_features, width, True, 0.1)
            self.embed_tokens = placement.layers.vocab_embedding(config.vocab_size, width, 0.1)
            self.positions = Embedding(config.max_positions, width, 0.1)
        self.layers = nn.LayerList(
            [
                DecoderLayer(config, placement)
                if placement.stage_layers.has_layer(i)
                else nn.Identity()
                for i in range(config.num_hidden_layers)
            ]
        )
        if placement.stage_layers.head:
            self.norm = placement.layers.row_wise(RMSNorm(width, 1e-6))
            self.head = placement.layers.vocab_head(width, config.vocab_size, 0.1)
        placement.parameter_table.add_replicated(self.parameters())

    @classmethod
    def from_config(cls, config: CaptionerConfig, dtype: str, placement: Placement) -> "Captioner":
        """A model whose `materialize` draws fresh values."""
        with default_dtype(dtype), paddle.LazyGuard():
            model = cls(config, placement)
        model.materialize_later(model._fresh_values)
        return model

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        dtype: str = "float32",
        placement: Placement | None = None,
    ) -> "Captioner":
        """A model whose `materialize` reads a folder's values."""
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        with default_dtype(dtype), paddle.LazyGuard():
            model = cls(CaptionerConfig.from_dict(values), placement)
        stored = checkpoint_tensors(folder)
        check_keys(folder, stored, model.full().stored_parameters(), set())
        model.materialize_later(lambda: stored_values(model.stored_parameters(), stored))
        return model

    def save_pretrained(
        self, folder: Path, write: FileWriter = write_file, store: ParameterStore | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ranks = self.placement.checkpoint_ranks
        if ranks.is_first:
            self.config.save_pretrained(folder)
        save_parameters(folder, self.stored_parameters(), ranks=ranks, write=write, store=store)

    def forward(
        self, input_ids: Tensor, labels: Tensor, features: Tensor, num_target_tokens: int = 0
    ) -> Tensor:
        """The summed cross entropy of the captions."""
        x_TD = self.embed(input_ids, features)
        x_TD = self.run_layers(range(len(self.layers)), x_TD, input_ids.shape[0])
        return self.loss_sum(x_TD, labels)

    def embed(self, input_ids: Tensor, features: Tensor) -> Tensor:
        regions_BRD = self.project(features)
        tokens_BLD = self.embed_tokens(input_ids)
        places = paddle.arange(self.config.num_regions + input_ids.shape[1])
        x_BSD = paddle.concat([regions_BRD, tokens_BLD], axis=1) + self.positions(places)
        return self.placement.ops.enter_rows(x_BSD.reshape([-1, self.config.hidden_size]))

    def run_layers(self, layers: range, x_TD: Tensor, batch_size: int) -> Tensor:
        for i in layers:
            x_TD = self.layers[i](x_TD, batch_size)
        return x_TD

    def loss_sum(self, x_TD: Tensor, labels: Tensor) -> Tensor:
        logits_TV = self.head(self.placement.ops.enter_columns(self.norm(x_TD)))
        no_labels = paddle.full([labels.shape[0], self.config.num_regions], -100, labels.dtype)
        targets_T = next_token_targets(paddle.concat([no_labels, labels], axis=1))
        return self.placement.ops.token_loss(logits_TV, targets_T)[0]

    @property
    def vision_blocks(self) -> list[nn.Layer]:
        return []

    @property
    def decoder_layers(self) -> list[nn.Layer]:
        layers = enumerate(self.layers)
        return [layer for i, layer in layers if self.placement.stage_layers.has_layer(i)]

    @property
    def tables(self) -> list[nn.Layer]:
        return [layer for layer in (self.embed_tokens, self.head) if layer is not None]

    def separate(self, weights: Iterable[Tensor]) -> None:
        separate(self, weights, self.placement.layers.separate_projections)

    def stored_parameters(self) -> list[StoredParameter]:
        return place_parameters(
            self.named_parameters(), CHECKPOINT_RULES, self.placement.parameter_table
        )

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        return {item.key: item.stored_shape for item in self.full().stored_parameters()}

    def full(self) -> "Captioner":
        """The unsharded model without values; on one device the model itself."""
        if not self.placement.splits_parameters:
            return self
        with paddle.LazyGuard():
            return Captioner(self.config)

    def _fresh_values(self) -> Iterator[Any]:
        own, splits = self.stored_parameters(), self.placement.splits_parameters
        return drawn_values(own, self.full().stored_parameters() if splits else None)


class CaptionerStage:
    """Some layers as a function of a batch; see `paddle_vl.parallel.pipeline.runner`."""

    def __init__(self, model: Captioner, layers: range):
        self.model, self.layers = model, layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == model.config.num_hidden_layers

    def input_shape(self, batch: CaptionBatch) -> tuple[int, int]:
        config = self.model.config
        size, length = batch["input_ids"].shape
        rows = size * (config.num_regions + length)
        return rows // self.model.placement.ops.row_part.size, config.hidden_size

    def __call__(self, batch: CaptionBatch, rows_TD: Tensor | None = None) -> Tensor:
        ids, labels, features = (
            paddle.to_tensor(batch[name]) if isinstance(batch[name], np.ndarray) else batch[name]
            for name in ("input_ids", "labels", "features")
        )
        x_TD = self.model.embed(ids, features) if self.is_first else rows_TD
        x_TD = self.model.run_layers(self.layers, x_TD, ids.shape[0])
        return self.model.loss_sum(x_TD, labels) if self.is_last else x_TD
