"""A vision-language model in reading order: vision tower, embedding with visual tokens, decoder,
head, loss. A family gives its configuration, its decoder and its checkpoint map.

Shapes: B batch, L padded length, T = B * L token rows, S keys with a cache, P patches, M visual
embeddings, D width, V vocabulary.

Source: Qwen3VLForConditionalGeneration of HF transformers, modeling_qwen3_vl.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.batch.positions import PATCH_FIELDS, PatchRows, frame_runs, patch_places
from paddle_vl.batch.schema import GRIDS, PIXELS, VLBatch
from paddle_vl.families.hf_interface import IndexedOutput
from paddle_vl.families.vlm.folders.pretrained import PretrainedVLModel
from paddle_vl.families.vlm.modeling.call_arguments import called_batch, compute_position_ids
from paddle_vl.families.vlm.modeling.layers import VisionFeatures, VisionTower
from paddle_vl.families.vlm.modeling.moe import LoadBalance
from paddle_vl.nn.attention import RowPool, Segments
from paddle_vl.nn.head_loss import (
    TargetRows,
    TargetSources,
    TokenStatistics,
    head_choices,
    head_log_probs,
    head_loss,
    head_scores,
    next_token_targets,
    num_targets,
    summed_cross_entropy,
)
from paddle_vl.nn.key_value_cache import KeyValueCache, KeyValuePool
from paddle_vl.nn.placement import Placement
from paddle_vl.nn.transfer import device_tensor


@dataclass
class VLOutput(IndexedOutput):
    """Output of the model; `output["loss"]`, and `output[0]` is the first that is not None.

    Attributes:
        loss: mean cross entropy over the target tokens, plus `aux_weight * aux_loss`; a float32
            scalar, None without labels. It is 0 for a batch without targets, where HF gives NaN.
        logits: `[B, L, V]`; under tensor parallelism this rank's shard of V. None if the loss was
            computed from `target_rows`, without them.
        loss_sum: sum of the cross entropy, for averages over several batches.
        num_target_tokens: number of target tokens; a Python int if the batch has it.
        aux_loss: load-balancing loss, see `LoadBalance`; None unless requested.
        aux_weight: weight of `aux_loss`, the configuration's `router_aux_loss_coef`.
        source_sums: `[S]` float32, sums of the cross entropy of each source of a training mix,
            without factors and gradients; None without `target_sources`.
        tokens: log-probabilities of the targets, with `returns_log_probs` in place of a loss.
        choices: `[N]` int64, the most likely tokens, with `returns_choices` in place of a loss.
        scores: `[N, V]` float32, the logits, with `returns_scores`.
    """

    loss: Tensor | None = None
    logits: Any = None
    loss_sum: Tensor | None = None
    num_target_tokens: int | Tensor | None = None
    aux_loss: Tensor | None = None
    aux_weight: float = 0.0
    source_sums: Tensor | None = None
    tokens: TokenStatistics | None = None
    choices: Tensor | None = None
    scores: Tensor | None = None

    def share_of_step(self, num_target_tokens: int, num_batches: int) -> Tensor:
        """This micro-batch's share of the loss of a step.

        Args:
            num_target_tokens: target tokens of all micro-batches of the step; the cross entropy is
                their mean.
            num_batches: number of these micro-batches; the auxiliary loss is their mean.
        """
        assert self.loss_sum is not None, "the batch has no labels"
        loss = self.loss_sum / num_target_tokens
        if self.aux_loss is not None:
            loss = loss + self.aux_weight * self.aux_loss / num_batches
        return loss


class VLForConditionalGeneration(PretrainedVLModel):
    """A complete model. Build it with `from_pretrained` or `from_config`.

        VLBatch of a loader, on the device      HF's arguments: called_batch
                      |                                  |
                   VLBatch <-----------------------------+
                      |------ pixels -----> visual (VisionTower)
                      |                          | merged rows [M, D], G levels [M, D]
                      | ids, indices             v
                      +-----> language_model.embedding (GPTEmbedding)
                                  | token rows [T, D], visual rows in place; index lists, levels
                                  v
                              language_model.layers, deepstack level g after layer g; norm
                                  |
                target rows? yes: lm_head of N rows, in chunks -> losses, log-probs, choices
                              no:  lm_head of all rows           -> logits, loss of labels

    Attributes:
        tower_class: makes `visual` of its configuration, a layer that is called as `VisionTower`
            and has `blocks`.
        decoder_class: makes `language_model` of the configuration and the placement: a layer with
            `embedding`, `layers`, `norm`, `run` and `run_layers`.
    """

    tower_class: ClassVar[Callable[[Any], nn.Layer]] = VisionTower
    decoder_class: ClassVar[Callable[[Any, Placement], Any]]

    def __init__(self, config: Any, placement: Placement | None = None):
        super().__init__(config, placement)
        text, tied = config.text_config, None
        if self.placement.stage_layers.tower:
            self.visual = self.placement.layers.tower(type(self).tower_class(config.vision_config))
        self.language_model = type(self).decoder_class(config, self.placement)
        if self.placement.stage_layers.embedding and config.tie_word_embeddings:
            tied = self.language_model.embedding.embed_tokens.weight
        if self.placement.stage_layers.head:
            self.lm_head = self.placement.layers.vocab_head(
                text.hidden_size,
                text.vocab_size,
                text.initializer_range,
                tied,
                config.tie_word_embeddings,
            )
        self.placement.parameter_table.add_replicated(self.parameters())

    def __call__(self, *inputs: Any, **fields: Any) -> Any:
        """Run the model on a `VLBatch` whose arrays are tensors, or on what `called_batch` makes
        one of: HF's arguments, or fields of a batch."""
        if inputs and isinstance(inputs[0], VLBatch):
            return super().__call__(*inputs)
        return super().__call__(called_batch(self.config, self.placement.ops, *inputs, **fields))

    def forward(self, batch: VLBatch) -> VLOutput:
        """Tower, embedding, decoder, and what the batch wants of the head.

        Raises:
            ValueError: packed samples with caches.
        """
        ops, caches, balance = self.placement.ops, batch.caches, None
        inputs = self.language_model.embedding(batch, self.encode_visual(batch))
        if caches is not None and "packed" in inputs:
            raise ValueError(
                "caches are given but the batch has packed samples (cu_seqlens): generation needs "
                "one prompt per row of the batch"
            )
        if caches is None and self.config.text_config.has_balance_loss(batch.output_router_logits):
            balance = LoadBalance(inputs["routed_rows"].num_real, ops.sum_routing)
        hidden_TD = self.language_model.run(inputs, caches, balance)
        if batch.target_rows is not None:
            return self.losses(hidden_TD, batch, balance)
        return self.predict(hidden_TD, batch, balance)

    def predict(
        self, hidden_TD: Tensor, batch: VLBatch, balance: LoadBalance | None = None
    ) -> VLOutput:
        """Logits of the token rows `[T, D]` after the final norm, and losses of labels."""
        shape = list(batch.input_ids.shape)
        if batch.logits_to_keep:
            hidden_BLD = hidden_TD.reshape([*shape, -1])[:, -batch.logits_to_keep :]
            shape = hidden_BLD.shape[:2]
            hidden_TD = hidden_BLD.reshape([-1, hidden_TD.shape[-1]])
        logits_TV = self.lm_head(self.placement.ops.enter_columns(hidden_TD))
        logits_BLV = logits_TV.reshape([*shape, -1])
        if batch.labels is None:
            return self._output(logits_BLV, None, None, None, balance)
        targets_T, weights_T = next_token_targets(batch.labels), None
        if batch.loss_weights is not None:
            # Shifted like the labels; the last of a row has no target.
            weights_T = batch.loss_weights.roll(-1, axis=1).reshape([-1])
        loss_sum = summed_cross_entropy(
            logits_TV, targets_T, weights_T, vocabulary=self.placement.ops.vocabulary
        )
        return self._output(logits_BLV, loss_sum, targets_T, batch.num_target_tokens, balance)

    def losses(
        self, hidden_TD: Tensor, batch: VLBatch, balance: LoadBalance | None = None
    ) -> VLOutput:
        """What the batch wants of its target rows, of the token rows `[T, D]` after the final norm:
        losses, log-probabilities or choices, without logits of the others."""
        ops, entered_TD = self.placement.ops, self.placement.ops.enter_columns(hidden_TD)
        rows_N, targets_N = batch.target_rows[0], batch.target_rows[1]
        if batch.returns_choices:
            return VLOutput(choices=head_choices(self.lm_head, entered_TD, rows_N, ops.vocabulary))
        if batch.returns_scores:
            return VLOutput(scores=head_scores(self.lm_head, entered_TD, rows_N, ops.vocabulary))
        if batch.returns_log_probs:
            output = self._output(None, None, targets_N, batch.num_target_tokens, balance)
            wanted = TargetRows(rows_N, targets_N)
            output.tokens = head_log_probs(
                self.lm_head, entered_TD, wanted, ops.vocabulary, batch.temperature
            )
            return output
        sources = None
        if batch.target_sources is not None:
            sources = TargetSources(batch.target_sources, paddle.zeros([batch.num_sources]))
        wanted = TargetRows(rows_N, targets_N, batch.target_weights, sources)
        loss_sum = head_loss(self.lm_head, entered_TD, wanted, ops.vocabulary)
        loss_sum = ops.context.total(loss_sum)
        output = self._output(None, loss_sum, targets_N, batch.num_target_tokens, balance)
        output.source_sums = None if sources is None else ops.context.total(sources.sums)
        return output

    def _output(
        self,
        logits_BLV: Tensor | None,
        loss_sum: Tensor | None,
        targets: Tensor | None,
        num_target_tokens: int | None,
        balance: LoadBalance | None,
    ) -> VLOutput:
        output = VLOutput(logits=logits_BLV, loss_sum=loss_sum)
        if loss_sum is not None:
            if num_target_tokens is None:
                assert targets is not None, "given with the loss"
                output.num_target_tokens = count = num_targets(targets)
                divisor = count.clip(min=1.0)
            else:
                output.num_target_tokens, divisor = num_target_tokens, max(num_target_tokens, 1)
            output.loss = loss_sum / divisor
        text = self.config.text_config
        if balance is not None:
            output.aux_loss = balance.loss()
            output.aux_weight = text.router_aux_loss_coef
            if output.loss is not None:
                output.loss = output.loss + output.aux_weight * output.aux_loss
        return output

    def encode_visual(self, batch: VLBatch) -> VisionFeatures | None:
        """Run the vision tower once over images and videos together, in this order; None for an
        all-text batch, so that the tower gets no gradient, as in HF. With
        `visual_rows_of_ranks` the features are those of this rank's token rows."""
        grids = [batch[name] for name in GRIDS if name in batch]
        if not grids:
            return None
        vision, has_own_only = self.config.vision_config, batch.own_patches is not None
        pixels = [batch[name] for name in ("own_patches", *PIXELS) if name in batch]
        merged, levels = self.placement.ops.encode_visual(
            self.encode_items,
            [
                pixels[0] if len(pixels) == 1 else paddle.concat(pixels),
                *(batch[name] for name in PATCH_FIELDS if name in batch),
            ],
            np.concatenate(grids),
            self.visual,
            merge=vision.spatial_merge_size,
            width=vision.out_hidden_size,
            num_levels=len(vision.deepstack_visual_indexes),
            rows_of_ranks=batch.visual_rows_of_ranks,
            has_own_only=has_own_only,
        )
        return VisionFeatures(merged, levels)

    def encode_items(self, patches: Sequence[Tensor], grid_thw: np.ndarray) -> VisionFeatures:
        """The tower's features of some images and videos, in their order.

        Args:
            patches: pixels `[P, patch_dim]`, maybe with the tensors of `PatchRows` behind them.
        """
        vision = self.config.vision_config
        pixels, *places = patches
        if not places:
            places = [device_tensor(each) for each in patch_places(grid_thw, vision).values()]
        return self.visual(pixels, PatchRows(*places), Segments(frame_runs(grid_thw)))

    def position_ids(self, *inputs: Any, **fields: Any) -> tuple[np.ndarray, np.ndarray]:
        """Positions `[3, B, L]` and rope deltas `[B]`, int64; see `compute_position_ids`."""
        return compute_position_ids(self.config, *inputs, **fields)

    def tokens_per_expert(self) -> dict[int, Tensor]:
        """Token rows per expert in the last call, without padding: `[E]` int64 by layer.

        Empty for a model without experts, and before the first call.
        """
        layers = enumerate(self.language_model.layers)
        counts = {
            i: layer.mlp.experts.tokens_per_expert
            for i, layer in layers
            if self.placement.stage_layers.has_layer(i) and layer.has_experts
        }
        return {i: count for i, count in counts.items() if count is not None}

    def generate(
        self, input_ids: Any, *args: Any, streamer: Any = None, **batch: Any
    ) -> np.ndarray:
        """All new tokens, `[B, n]` int64, n <= max_new_tokens; arguments and errors as of
        `paddle_vl.families.vlm.answering.generate.stream`.

        Args:
            streamer: gets the prompts and then the tokens of every step, as in HF; see
                `paddle_vl.generation.loop.Streamer`.
        """
        from paddle_vl.generation.loop import collected

        return collected(self.stream(input_ids, *args, **batch), input_ids, streamer)

    def stream(self, *args: Any, **batch: Any) -> Iterator[np.ndarray]:
        """Generated tokens `[B]` int64 per step, see `vlm.answering.generate`."""
        from paddle_vl.families.vlm.answering.generate import stream

        return stream(self, *args, **batch)

    def new_caches(self, prompt: int, most: int | None) -> list[KeyValueCache]:
        """A cache per decoder layer of the full model, for prompts of a length and maybe a
        most of keys in all."""
        return [KeyValueCache(prompt, most) for _ in self.language_model.layers]

    def new_pool(self, number: int, places: int, num_rows: int) -> RowPool:
        """What the decoder layer of that number of the full model keeps of rows that share a memory
        for so many keys."""
        text, weight = self.config.text_config, self.language_model.embedding.embed_tokens.weight
        return KeyValuePool(places, text.num_key_value_heads, text.head_dim, weight.dtype)

    @property
    def vision_blocks(self) -> list[nn.Layer]:
        """Blocks of the tower, the units of activation recomputation and parameter sharding."""
        return [] if self.visual is None else list(self.visual.blocks)

    @property
    def decoder_layers(self) -> list[nn.Layer]:
        """Decoder layers of this stage, the units of recomputation and parameter sharding."""
        layers = enumerate(self.language_model.layers)
        return [layer for i, layer in layers if self.placement.stage_layers.has_layer(i)]

    @property
    def tables(self) -> list[nn.Layer]:
        """The token embedding and the head, if this stage has them; tied ones share `weight`."""
        has_embedding = self.placement.stage_layers.embedding
        layers = [self.language_model.embedding.embed_tokens] if has_embedding else []
        return layers if self.lm_head is None else [*layers, self.lm_head]
