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

from paddle_vl.batch.positions import (
    PATCH_FIELDS,
    PatchRows,
    check_offsets,
    checked_grid,
    frame_runs,
    mrope_position_ids,
    restart_offsets,
    vision_layout,
)
from paddle_vl.families.hf_interface import FORWARD, IndexedOutput, id_rows
from paddle_vl.families.vlm.layers import VisionFeatures, VisionTower
from paddle_vl.families.vlm.moe import LoadBalance, routed_rows
from paddle_vl.families.vlm.pretrained import PretrainedVLModel
from paddle_vl.files.names import refuse_foreign
from paddle_vl.nn.attention import PackedSamples, Segments
from paddle_vl.nn.attention_masks import SliceMask
from paddle_vl.nn.experts import ExpertCapacity
from paddle_vl.nn.key_value_cache import KeyValueCache, KeyValuePool, RowPool
from paddle_vl.nn.objective import (
    SourceSums,
    TargetRows,
    TargetSources,
    TokenStatistics,
    next_token_targets,
    num_targets,
)
from paddle_vl.nn.operations import device_tensor, host_array
from paddle_vl.nn.placement import Placement

Array = np.ndarray | Tensor


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

    Attributes:
        decoder_class: makes `language_model` of the configuration and the placement: a layer with
            `embedding`, `layers`, `norm`, `run` and `run_layers`.
    """

    decoder_class: ClassVar[Callable[[Any, Placement], Any]]

    def __init__(self, config: Any, placement: Placement | None = None):
        super().__init__(config, placement)
        text, tied = config.text_config, None
        if self.placement.stage_layers.tower:
            self.visual = self.placement.layers.tower(VisionTower(config.vision_config))
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

    def forward(
        self,
        input_ids: Array,
        attention_mask: Array | None = None,
        *,
        labels: Array | None = None,
        pixel_values: Array | None = None,
        pixel_values_videos: Array | None = None,
        own_patches: Array | None = None,
        patch_coordinates: Array | None = None,
        patch_tap_rows: Array | None = None,
        patch_tap_weights: Array | None = None,
        visual_rows_of_ranks: Sequence[np.ndarray] | None = None,
        num_target_tokens: int | None = None,
        loss_weights: Array | None = None,
        target_rows: Array | None = None,
        target_weights: Array | None = None,
        label_sources: Array | None = None,
        target_sources: Array | None = None,
        num_sources: int = 0,
        returns_log_probs: bool = False,
        returns_choices: bool = False,
        caches: list[KeyValueCache] | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int = 0,
        **layout: Any,
    ) -> VLOutput:
        """Run the model on HF's inputs, or on a batch of the collator.

        Arrays may be NumPy arrays or tensors, ids with mask and labels also lists.

        Args:
            input_ids: `[B, L]` int64 with placeholders for visual tokens.
            attention_mask: `[B, L]`, 1 at real tokens; with caches `[B, S]` over all keys so far.
            labels: `[B, L]` int64, not shifted, -100 ignored.
            pixel_values: `[P, patch_dim]` patches of all images; `pixel_values_videos` of videos.
            own_patches: in place of both, see `encode_visual`.
            patch_coordinates, patch_tap_rows, patch_tap_weights: places of all patches, see
                `paddle_vl.batch.positions.PatchRows`; None to compute them on the host.
            visual_rows_of_ranks: see `encode_visual`.
            num_target_tokens: number of labels that count, if the host knows it.
            loss_weights: `[B, L]` float32 factors of the labels' cross entropies; None for 1.
            target_rows: `[2, N]` int64, the token rows that predict a label, and these labels. The
                loss is then computed from them, in place of `labels` and `loss_weights`, in chunks
                and without the logits of all rows: what training needs.
            target_weights: `[N]` float32 factors of their cross entropies; None for 1.
            label_sources: `[B, L]`, from which `target_sources` were taken; not read.
            target_sources: `[N]` int64 numbers, below `num_sources`, of the sources of these
                labels, for `source_sums`; None for no such sums.
            returns_log_probs: give the log-probabilities of `target_rows` in place of a loss, for
                an objective over them; weights and sources are not read.
            returns_choices: give the most likely token after each of the rows in `target_rows` in
                place of a loss, to generate with `caches`; the labels are not read.
            caches: one per decoder layer when generating.
            output_router_logits: compute `aux_loss` over the real tokens and add it to the loss;
                None for the configuration's setting. Not with caches.
            logits_to_keep: compute the logits of that many last columns only, 0 for all; without
                labels.
            layout: further keyword arguments of `decoder_arguments`: positions, grids, visual
                indices, padding, offsets of packed samples.

        Raises:
            ValueError: placeholders, grids and patches do not agree; router logits of a model
                without experts, or of a padded batch in a traced program; labels with
                `logits_to_keep`; segments that do not tile the token rows, or packed samples with
                caches.
        """
        if isinstance(input_ids, list):
            given = (input_ids, attention_mask, labels)
            input_ids, attention_mask, labels = (id_rows(rows) for rows in given)
        if labels is not None and logits_to_keep:
            raise ValueError(
                f"logits_to_keep is {logits_to_keep} but labels are given, whose loss needs the "
                "logits of all columns: leave one of them out"
            )
        dict_args = self.decoder_arguments(
            input_ids=input_ids, attention_mask=attention_mask, **layout
        )
        if caches is not None and dict_args["packed"] is not None:
            raise ValueError(
                "caches are given but the batch has packed samples (cu_seqlens): generation needs "
                "one prompt per row of the batch"
            )
        dict_args |= self.encode_visual(
            pixel_values,
            layout.get("image_grid_thw"),
            pixel_values_videos,
            layout.get("video_grid_thw"),
            own_patches=own_patches,
            patch_coordinates=patch_coordinates,
            patch_tap_rows=patch_tap_rows,
            patch_tap_weights=patch_tap_weights,
            visual_rows_of_ranks=visual_rows_of_ranks,
        )
        balance = None
        if caches is None and self.config.text_config.has_balance_loss(output_router_logits):
            if not isinstance(attention_mask, Array | None):
                raise ValueError(
                    "the load-balancing loss leaves padding out, for which it needs the values of "
                    "attention_mask: pass an array, or none, or output_router_logits=False"
                )
            balance = LoadBalance(dict_args["routed_rows"].num_real, self.placement.ops.sum_routing)
        inputs = self.language_model.embedding(dict_args)
        hidden_TD = self.language_model.run(inputs, caches, balance)
        shape = list(input_ids.shape)
        if logits_to_keep:
            hidden_BLD = hidden_TD.reshape([*shape, -1])[:, -logits_to_keep:]
            shape = hidden_BLD.shape[:2]
            hidden_TD = hidden_BLD.reshape([-1, hidden_TD.shape[-1]])
        if target_rows is not None:
            of_targets = (target_weights, target_sources, num_sources)
            returns = (returns_log_probs, returns_choices)
            of_targets = (num_target_tokens, balance, *of_targets, *returns)
            return self.losses(hidden_TD, target_rows, *of_targets)
        return self.predict(hidden_TD, shape, labels, num_target_tokens, balance, loss_weights)

    def decoder_arguments(
        self,
        *,
        input_ids: Array,
        attention_mask: Array | None = None,
        position_ids: Array | None = None,
        image_grid_thw: Array | None = None,
        video_grid_thw: Array | None = None,
        visual_update_indices: Array | None = None,
        visual_gather_indices: Array | None = None,
        visual_source_indices: Array | None = None,
        num_unused_visual_rows: int = 0,
        num_reused_visual_rows: int = 0,
        has_left_padding: bool | None = None,
        cu_seqlens: Array | None = None,
        packed_key_ends: Array | None = None,
        slice_key_rows: Array | None = None,
        slice_orders: Array | None = None,
        real_row_indices: Array | None = None,
        num_real_rows: int | None = None,
        expert_capacity: ExpertCapacity | None = None,
        **foreign: Any,
    ) -> dict[str, Any]:
        """The input of `GPTEmbedding` without the outputs of the vision tower.

        Args:
            input_ids, attention_mask: as of `forward`.
            position_ids: `[3, B, L]` int64, None to compute them on the host from ids and grids.
                Or `[4, B, L]` with a text position first, whose restarts mark packed samples if
                neither `cu_seqlens` nor an attention mask is given; that costs a host read.
            image_grid_thw, video_grid_thw: `[n, 3]` patches (t, h, w) per image or video, on the
                host: a Paddle tensor costs a transfer.
            visual_update_indices, visual_gather_indices, visual_source_indices: the collator's
                index arrays, see `paddle_vl.batch.visual_index`; None to compute them.
            num_unused_visual_rows: visual embeddings that no token receives, of the dummy image
                with which a batch without images runs the tower, so that all ranks issue the same
                collectives.
            num_reused_visual_rows: visual tokens beyond one for each visual embedding, of samples
                that share an image; the indices then name an embedding several times.
            has_left_padding: False if no real token follows padding; causality then hides the
                padding and no mask is applied.
            cu_seqlens: `[S + 1]` int32 offsets of packed samples on the host, see
                `paddle_vl.batch.positions`. Padding is a segment of its own; the first label of
                each sample must be -100. Not with caches.
            packed_key_ends: `[B, L]` int32, `batch.positions.key_ends` of the offsets; None to
                compute it where a kernel needs it.
            slice_key_rows, slice_orders: `[1, 1, T, 2]` int32 and `[2, T]` int64, of a slice of the
                token rows, see `paddle_vl.batch.schema`; None for all of them.
            real_row_indices, num_real_rows: token rows that are not padding, for a model with
                experts; None to take them from the mask, see `routed_rows`.
            expert_capacity: for a step with expert parallelism; None for exact sizes.
            foreign: arguments of HF at values that ask for nothing.

        Raises:
            ValueError: segments that do not tile the token rows; or another argument of HF, with
                what to do instead.
        """
        if foreign:
            refuse_foreign(foreign, FORWARD, "the model")
        offsets = host_array(cu_seqlens)
        if position_ids is None:
            position_ids, _ = self.position_ids(
                input_ids, attention_mask, image_grid_thw, video_grid_thw, offsets
            )
        elif position_ids.shape[0] == 4:
            if offsets is None and attention_mask is None:
                offsets = restart_offsets(host_array(position_ids[0]))
            position_ids = position_ids[1:]
        packed = None
        if offsets is not None:
            batch, length = input_ids.shape
            check_offsets(offsets, batch, length)
            # With one segment per row, causal attention suffices.
            if len(offsets) > batch + 1:
                packed = PackedSamples(offsets, length, device_tensor(packed_key_ends))
        if slice_key_rows is not None:
            whole = slice_orders is not None
            queries = (slice_key_rows.shape[2:] if whole else input_ids.shape[1:])[0]
            packed = SliceMask(device_tensor(slice_key_rows), queries, device_tensor(slice_orders))
        mask_is_needed = (
            attention_mask is not None and has_left_padding is not False and offsets is None
        )
        rows = None
        if getattr(self.config.text_config, "num_experts", 0):
            shape, part = tuple(input_ids.shape), self.placement.ops.expert_part
            rows = routed_rows(
                shape, attention_mask, real_row_indices, num_real_rows, part, expert_capacity
            )
        return {
            "input_ids": device_tensor(input_ids),
            "position_ids": device_tensor(position_ids),
            "routed_rows": rows,
            "attention_mask": device_tensor(attention_mask) if mask_is_needed else None,
            "packed": packed,
            "visual_update_indices": device_tensor(visual_update_indices),
            "visual_gather_indices": device_tensor(visual_gather_indices),
            "visual_source_indices": device_tensor(visual_source_indices),
            "num_unused_visual_rows": (
                num_unused_visual_rows - num_reused_visual_rows if slice_key_rows is None else None
            ),
        }

    def predict(
        self,
        hidden_TD: Tensor,
        shape: Sequence[int],
        labels: Array | None = None,
        num_target_tokens: int | None = None,
        balance: LoadBalance | None = None,
        loss_weights: Array | None = None,
    ) -> VLOutput:
        """Logits and losses of the token rows `[T, D]` after the final norm; `shape` is (B, L)."""
        logits_TV = self.lm_head(self.placement.ops.enter_columns(hidden_TD))
        logits_BLV = logits_TV.reshape([*shape, -1])
        loss_sum, targets_T = None, None
        if labels is not None:
            targets_T = next_token_targets(device_tensor(labels))
            weights_T = None
            if loss_weights is not None:
                # Shifted like the labels; the last of a row has no target.
                weights_T = device_tensor(loss_weights).roll(-1, axis=1).reshape([-1])
            loss_sum = self.placement.ops.summed_cross_entropy(logits_TV, targets_T, weights_T)
        return self._output(logits_BLV, loss_sum, targets_T, num_target_tokens, balance)

    def losses(
        self,
        hidden_TD: Tensor,
        target_rows: Array,
        num_target_tokens: int | None = None,
        balance: LoadBalance | None = None,
        target_weights: Array | None = None,
        target_sources: Array | None = None,
        num_sources: int = 0,
        returns_log_probs: bool = False,
        returns_choices: bool = False,
    ) -> VLOutput:
        """Losses of the token rows `[T, D]` after the final norm, without logits; see `forward`."""
        rows_2R, ops = device_tensor(target_rows), self.placement.ops
        if returns_choices:
            entered_TD = ops.enter_columns(hidden_TD)
            return VLOutput(choices=ops.head_choices(self.lm_head, entered_TD, rows_2R[0]))
        targets_R = rows_2R[1]
        if returns_log_probs:
            entered_TD = ops.enter_columns(hidden_TD)
            targets = TargetRows(rows_2R[0], targets_R)
            output = self._output(None, None, targets_R, num_target_tokens, balance)
            output.tokens = ops.head_log_probs(self.lm_head, entered_TD, targets)
            return output
        sources = None
        if target_sources is not None:
            sources = TargetSources(device_tensor(target_sources), SourceSums(num_sources))
        targets = TargetRows(rows_2R[0], targets_R, device_tensor(target_weights), sources)
        loss_sum = ops.head_loss(self.lm_head, ops.enter_columns(hidden_TD), targets)
        loss_sum = ops.context.total(loss_sum)
        output = self._output(None, loss_sum, targets_R, num_target_tokens, balance)
        output.source_sums = None if sources is None else ops.context.total(sources.sums.total)
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

    def encode_visual(
        self,
        pixel_values: Array | None = None,
        image_grid_thw: Array | None = None,
        pixel_values_videos: Array | None = None,
        video_grid_thw: Array | None = None,
        visual_rows_of_ranks: Sequence[np.ndarray] | None = None,
        own_patches: Array | None = None,
        **places: Array | None,
    ) -> dict[str, Any]:
        """Run the vision tower once over images and videos together.

        Args:
            pixel_values, pixel_values_videos: `[P, patch_dim]`.
            image_grid_thw, video_grid_thw: `[n, 3]` int64.
            visual_rows_of_ranks: the rows that each rank gets, images first, in its order; in
                place of all rows for all ranks. They are returned as if all were of one kind.
            own_patches: `[P, patch_dim]` in place of both: of the items that this rank encodes,
                see `RegionOps.own_items`, images first.
            places: `PATCH_FIELDS` of the patches given, images first; None to compute them.

        Returns:
            `image_embeds` `[M, D]`, `deepstack_image_embeds` (a list of `[M, D]`) and the same for
            videos; empty for an all-text batch, so that the tower gets no gradient, as in HF.

        Raises:
            ValueError: pixels without their grid or the reverse, or a different number of patches.
        """
        vision = self.config.vision_config
        grids, all_pixels = {}, []
        for kind, pixels, grid in (
            ("image", pixel_values, image_grid_thw),
            ("video", pixel_values_videos, video_grid_thw),
        ):
            if own_patches is not None and grid is not None:
                grids[kind] = host_array(grid)
            elif pixels is not None or grid is not None:
                count = None if pixels is None else pixels.shape[0]
                grids[kind] = checked_grid(kind, count, host_array(grid))
                all_pixels.append(device_tensor(pixels))
        if not grids:
            return {}
        if own_patches is not None:
            all_pixels = [device_tensor(own_patches)]
        patches = [all_pixels[0] if len(all_pixels) == 1 else paddle.concat(all_pixels)]
        if places.get(PATCH_FIELDS[0]) is not None:
            patches += [device_tensor(places[name]) for name in PATCH_FIELDS]
        merged, levels = self.placement.ops.encode_visual(
            self.encode_items,
            patches,
            np.concatenate(list(grids.values())),
            self.visual,
            merge=vision.spatial_merge_size,
            width=vision.out_hidden_size,
            num_levels=len(vision.deepstack_visual_indexes),
            rows_of_ranks=visual_rows_of_ranks,
            has_own_only=own_patches is not None,
        )
        if visual_rows_of_ranks is not None:
            kind = next(iter(grids))
            return {f"{kind}_embeds": merged, f"deepstack_{kind}_embeds": levels}
        embeds, begin, block = {}, 0, vision.spatial_merge_size**2
        for kind, grid in grids.items():
            own = slice(begin, begin + int(grid.prod(axis=1).sum()) // block)
            begin = own.stop
            # The rows of one kind are all of them.
            sections = [x if len(grids) == 1 else x[own] for x in (merged, *levels)]
            embeds[f"{kind}_embeds"], *embeds[f"deepstack_{kind}_embeds"] = sections
        return embeds

    def encode_items(self, patches: Sequence[Tensor], grid_thw: np.ndarray) -> VisionFeatures:
        """The tower's features of some images and videos, in their order.

        Args:
            patches: pixels `[P, patch_dim]`, maybe with the tensors of `PatchRows` behind them.
        """
        vision = self.config.vision_config
        pixels, *places = patches
        if not places:
            side, merge = vision.table_side, vision.spatial_merge_size
            layout = vision_layout(grid_thw, table_side=side, merge=merge)
            places = [device_tensor(each) for each in layout]
        return self.visual(pixels, PatchRows(*places), Segments(frame_runs(grid_thw)))

    def position_ids(
        self,
        input_ids: Array,
        attention_mask: Array | None = None,
        image_grid_thw: Array | None = None,
        video_grid_thw: Array | None = None,
        cu_seqlens: Array | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Positions `[3, B, L]` and rope deltas `[B]`, int64; see `mrope_position_ids`."""
        return mrope_position_ids(
            host_array(input_ids),
            host_array(attention_mask),
            host_array(image_grid_thw),
            host_array(video_grid_thw),
            image_token_id=self.config.image_token_id,
            video_token_id=self.config.video_token_id,
            spatial_merge_size=self.config.vision_config.spatial_merge_size,
            cu_seqlens=host_array(cu_seqlens),
        )

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
        `paddle_vl.families.vlm.generate.stream`.

        Args:
            streamer: gets the prompts and then the tokens of every step, as in HF; see
                `paddle_vl.generation.loop.Streamer`.
        """
        from paddle_vl.generation.loop import collected

        return collected(self.stream(input_ids, *args, **batch), input_ids, streamer)

    def stream(self, *args: Any, **batch: Any) -> Iterator[np.ndarray]:
        """Generated tokens `[B]` int64 per step, see `paddle_vl.families.vlm.generate`."""
        from paddle_vl.families.vlm.generate import stream

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
