"""The high-level planner's model: from images and instructions to memory and the next subtask.

Shapes: B batch, L prefix tokens, D backbone width, V vocabulary; S tokens of a segment that the
planner writes, its memory or its response.

Source: PI07HighLevelPlannerModel of OpenTau.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.families.pi07.attention_masks import (
    prefix_positions,
    suffix_mask,
    suffix_positions,
)
from paddle_vl.families.pi07.block_embedding import joined, look_up, of_cameras
from paddle_vl.families.pi07.embeddings import PAD_ID, PaddedEmbedding
from paddle_vl.families.pi07.flow_matching import as_tensors
from paddle_vl.families.pi07.freeze import freeze
from paddle_vl.families.pi07.gemma_layers import KeyValue
from paddle_vl.families.pi07.interleaved import DecoderOutput, InterleavedDecoder
from paddle_vl.families.pi07.placed_model import PlacedModel
from paddle_vl.families.pi07.planner_config import PI07PlannerConfig
from paddle_vl.families.pi07.prefix import Prefix
from paddle_vl.families.pi07.prefix_layout import (
    PLANNER_BLOCKS,
    Presence,
    Source,
    presence_of,
)
from paddle_vl.families.pi07.prefix_tokens import PrefixTokens
from paddle_vl.families.pi07.video_encoder import VideoEncoder
from paddle_vl.nn.functional import IGNORE_INDEX
from paddle_vl.nn.placement import Placement

_RESPONSE_LABEL, _MEMORY_LABEL = "Subtask: ", "Updated Memory: "


class PlannerEmbedding(nn.Layer):
    """Everything that turns a batch into the rows of the planner's prefix."""

    def __init__(
        self,
        config: PI07PlannerConfig,
        tokens: PrefixTokens,
        placement: Placement,
    ):
        super().__init__()
        backbone = config.vlm_config.gemma3_config
        width = backbone.text_config.hidden_size
        self.tokens = tokens
        # One frame: no layer of the tower has anything to look back at.
        layers = backbone.vision_config.num_hidden_layers
        self.video_encoder = VideoEncoder(backbone, 1, layers + 1, placement)
        self.embed_tokens = PaddedEmbedding(
            placement.layers.vocab_embedding(backbone.text_config.vocab_size, width, is_tied=True),
            scale=width**0.5,
        )

    def forward(self, batch: Mapping[str, Any], presence: Presence, training: bool) -> Prefix:
        """Embed a batch; in training with what the planner is to write.

        Args:
            presence: whether to lay metadata out; the rest does not matter.

        Raises:
            ValueError: metadata is to be laid out that the batch has no field for.
        """
        blocks = self.tokens.embedded(batch, presence, training)
        texts = [block for block in blocks if block.source is not Source.IMAGES]
        ids = {block.name: self.tokens.ids(block, batch) for block in texts}
        rows = look_up(self.embed_tokens, ids)
        images = self.video_encoder.embed_image(paddle.concat(batch["images"]))
        rows["images"] = of_cameras(images, len(batch["images"]))
        masks = self.tokens.masks(batch, presence, training)
        return Prefix(joined(blocks, rows, presence, training), *masks)


class PI07HighLevelPlannerModel(PlacedModel):
    """Embedding, the backbone's half of the decoder, and the head, which is the token table."""

    def __init__(
        self,
        config: PI07PlannerConfig,
        label_ids: Mapping[str, Sequence[int]],
        placement: Placement | None = None,
    ):
        """
        Args:
            label_ids: token ids, without special tokens, of `prefix_layout.PLANNER_LABELS`.

        Raises:
            ValueError: labels without ids, or with another number than the configuration says.
        """
        super().__init__(config, label_ids, placement)
        backbone = config.vlm_config.gemma3_config
        self.tokens = PrefixTokens(PLANNER_BLOCKS, label_ids, backbone.mm_tokens_per_image)
        for label, name in (
            (_RESPONSE_LABEL, "subtask_indicator_max_length"),
            (_MEMORY_LABEL, "memory_indicator_max_length"),
        ):
            if getattr(config, name) not in (None, len(label_ids[label])):
                raise ValueError(
                    f"{name} is {getattr(config, name)}, but the tokenizer makes "
                    f"{len(label_ids[label])} tokens of {label!r}: set it to that, or to None"
                )
        stage = self.placement.stage_layers
        self.prefix, self.lm_head, table = None, None, None
        if stage.embedding:
            self.prefix = PlannerEmbedding(config, self.tokens, self.placement)
            table = self.prefix.embed_tokens.weight
        self.decoder = InterleavedDecoder(config.vlm_config, self.placement)
        if stage.head:
            text = backbone.text_config
            self.lm_head = self.placement.layers.vocab_head(
                text.hidden_size, text.vocab_size, tied_weight=table, is_tied=True
            )
        self.placement.parameter_table.add_replicated(self.parameters())
        freeze(self, config.vlm_config)

    def forward(
        self, batch: Mapping[str, Any], presence: Presence | None = None
    ) -> dict[str, Tensor]:
        """The losses of a batch.

        Args:
            batch: `images`, a list of `[B, 3, H, W]` in [-1, 1], and `img_masks`; `lang_`,
                `memory_` and `response_`, maybe `metadata_`, each with `tokens` and `masks`.
            presence: whether to lay metadata out; None for whether the batch has any.

        Returns:
            `CE`, the sum of both segments' means over all their slots but the first; `MSE`, which
            is 0; and `CE_memory_sum` and `CE_response_sum`, what those are the means of.
        """
        presence = presence_of(batch) if presence is None else presence
        batch = as_tensors(batch)
        prefix = self.prefix(batch, presence, training=True)
        out = self.decoder(prefix.embs, prefix_view=self.prefix_view(prefix))
        return self.losses(out, batch)

    def losses(self, out: DecoderOutput, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """What `forward` returns."""
        out_BLD = out.prefix
        response, memory = batch["response_tokens"], batch["memory_tokens"]
        response_at = out_BLD.shape[1] - response.shape[1]
        label = len(self.tokens.label_ids[_RESPONSE_LABEL])
        memory_at = response_at - label - memory.shape[1]
        sums = [
            self._segment_loss_sum(out_BLD, memory_at, memory, batch["memory_masks"]),
            self._segment_loss_sum(out_BLD, response_at, response, batch["response_masks"]),
        ]
        # The means are over all slots, masked ones too.
        slots = [tokens_BS[:, 1:].size for tokens_BS in (memory, response)]
        loss = sums[0] / slots[0] + sums[1] / slots[1]
        return {
            "MSE": paddle.zeros_like(loss),
            "CE": loss,
            "CE_memory_sum": sums[0],
            "CE_response_sum": sums[1],
        }

    def _segment_loss_sum(
        self, out_BLD: Tensor, begin: int, tokens_BS: Tensor, masks_BS: Tensor
    ) -> Tensor:
        """Each token of a segment predicts the next; none predicts the first."""
        rows = out_BLD[:, begin : begin + tokens_BS.shape[1] - 1]
        tokens, ignored = tokens_BS[:, 1:], paddle.full_like(tokens_BS[:, 1:], IGNORE_INDEX)
        targets_T = paddle.where(masks_BS[:, 1:], tokens, ignored).reshape([-1])
        logits_TV = self.head(rows.reshape([-1, rows.shape[-1]]))
        return self.placement.ops.token_loss(logits_TV, targets_T)[0]

    def head(self, rows: Tensor) -> Tensor:
        """Logits `[..., V]` of rows, or those of this rank's part of the vocabulary."""
        return self.lm_head(self.placement.ops.enter_head(rows))

    @paddle.no_grad()
    def generate(
        self, batch: Mapping[str, Any], bos_id: int, eos_id: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Memory and response, greedily: int64 `[B, length]`, the lengths of the configuration.

        Both begin with `bos_id`; behind `eos_id` there is padding.

        Args:
            batch: as for `forward`, without what is to be written.

        Raises:
            ValueError: the model is one rank's part.
        """
        if self.placement.splits_parameters:
            raise ValueError(
                "this model is one process's part of a model; to generate, load the checkpoint in "
                "a single process"
            )
        presence, batch = presence_of(batch), as_tensors(batch)
        prefix = self.prefix(batch, presence, training=False)
        writer = _Writer(self, prefix)
        memory = writer.write(self.config.memory_max_length, bos_id, eos_id)
        label_Bn = self.tokens.label(_RESPONSE_LABEL, memory.shape[0])
        writer.read(label_Bn, paddle.ones(label_Bn.shape, dtype="bool"))
        return memory, writer.write(self.config.response_max_length, bos_id, eos_id)


class _Writer:
    """Decoding with cached keys and values; all that was read so far."""

    def __init__(self, model: PI07HighLevelPlannerModel, prefix: Prefix):
        self.model, self.pad_BL = model, prefix.pad_masks
        output = model.decoder(prefix.embs, prefix_view=model.prefix_view(prefix), keep=True)
        self.cache: list[KeyValue] = output.cache
        self.last_B1D = output.prefix[:, -1:]

    def read(self, ids_Bn: Tensor, pad_Bn: Tensor) -> None:
        """Go on by tokens, each of which sees all real ones before it."""
        decoder = self.model.decoder
        marks = paddle.ones(pad_Bn.shape, dtype="bool")
        positions = suffix_positions(self.pad_BL, 1) + prefix_positions(pad_Bn)
        view = decoder.view(positions, suffix_mask(self.pad_BL, pad_Bn, marks))
        rows = self.model.prefix.embed_tokens(ids_Bn)
        output = decoder(rows, prefix_view=view, cache=self.cache, keep=True)
        self.pad_BL = paddle.concat([self.pad_BL, pad_Bn], axis=1)
        self.cache, self.last_B1D = output.cache, output.prefix[:, -1:]

    def write(self, length: int, bos_id: int, eos_id: int) -> np.ndarray:
        """A segment, int64 `[B, length]`."""
        size = self.last_B1D.shape[0]
        tokens = np.full((size, 1), bos_id, dtype=np.int64)
        self.read(paddle.to_tensor(tokens), paddle.ones([size, 1], dtype="bool"))
        while tokens.shape[1] < length:
            token = self.model.head(self.last_B1D).argmax(axis=-1).numpy()
            # What is checked from the second token on: the first after BOS is always real.
            ended = np.isin(tokens, (eos_id, PAD_ID)).any(axis=1, keepdims=True)
            ended &= tokens.shape[1] > 1
            token = np.where(ended, PAD_ID, token)
            tokens = np.concatenate([tokens, token], axis=1)
            self.read(paddle.to_tensor(token), paddle.to_tensor(~ended))
        return tokens
