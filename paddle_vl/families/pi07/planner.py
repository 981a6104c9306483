"""The high-level planner: from raw observations to texts, a memory and the next subtask.

Raw batches are those of `paddle_vl.families.pi07.policy` with one frame: `state` `[B, S]`, images
`[B, 3, H, W]` in [0, 1] by camera name, `prompt`, `past_memory` and metadata; for training also
`next_memory` and `response`.

Shapes: B batch, L prefix tokens, D backbone width, V vocabulary, n tokens of memory or response.

Source: PI07HighLevelPlannerPolicy and PI07HighLevelPlannerModel of OpenTau.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.families.pi07.config import PI07PlannerConfig
from paddle_vl.families.pi07.decoder import (
    DecoderOutput,
    InterleavedDecoder,
    prefix_positions,
    suffix_mask,
)
from paddle_vl.families.pi07.flow import PolicyModel, as_tensors
from paddle_vl.families.pi07.policy import BasePolicy
from paddle_vl.families.pi07.prefix import (
    MEMORY_LABEL,
    PAD_ID,
    PLANNER_BLOCKS,
    RESPONSE_LABEL,
    Prefix,
    presence_of,
)
from paddle_vl.families.policy.acting import (
    BOS,
    Plan,
    WritingRules,
    plan_of,
    write_plan,
)
from paddle_vl.families.policy.model_inputs import EOS, PlannerInputs
from paddle_vl.nn.head_loss import TargetRows, head_loss
from paddle_vl.nn.key_value_cache import KeyValueCache
from paddle_vl.nn.placement import Placement


class PI07HighLevelPlannerModel(PolicyModel):
    """Prefix embedding, the backbone half of the decoder, and a head tied to the token table.

    Batches: `images`, a list of `[B, 3, H, W]` in [-1, 1] with `img_masks`, a list of `[B]`;
    `lang_`, `memory_`, `response_` and optionally `metadata_`, each with `tokens` and `masks`.
    """

    config: PI07PlannerConfig
    blocks = PLANNER_BLOCKS
    tied_embedding = "model.gemma3_with_expert.gemma3.model.language_model.embed_tokens"
    # None on pipeline stages without it.
    lm_head: Any

    def __init__(
        self,
        config: PI07PlannerConfig,
        label_ids: Mapping[str, Sequence[int]],
        placement: Placement | None = None,
    ):
        super().__init__(config, label_ids, placement)
        for label, name in (
            (RESPONSE_LABEL, "subtask_indicator_max_length"),
            (MEMORY_LABEL, "memory_indicator_max_length"),
        ):
            if getattr(config, name) not in (None, len(label_ids[label])):
                raise ValueError(
                    f"{name} is {getattr(config, name)}, but the tokenizer makes "
                    f"{len(label_ids[label])} tokens of {label!r}: set it to that, or to None"
                )
        stage, text = self.placement.stage_layers, config.vlm_config.gemma3_config.text_config
        self.lm_head = None
        self.decoder = InterleavedDecoder(config.vlm_config, self.placement)
        if stage.head:
            self.lm_head = self.placement.layers.vocab_head(
                text.hidden_size,
                text.vocab_size,
                tied_weight=self.prefix.embed_tokens.weight if stage.embedding else None,
                is_tied=True,
            )
        self.finish()

    def losses(self, out: DecoderOutput, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """`CE`, the mean over memory slots plus the mean over response slots, without the first
        slot of each; `CE_memory_sum` and `CE_response_sum`, their sums; `MSE`, which is 0.
        """
        out_BLD = out.prefix
        response, memory = batch["response_tokens"], batch["memory_tokens"]
        response_at = out_BLD.shape[1] - response.shape[1]
        memory_at = response_at - len(self.tokens.label_ids[RESPONSE_LABEL]) - memory.shape[1]
        sums = [
            self._segment_loss_sum(out_BLD, memory_at, memory, batch, "memory"),
            self._segment_loss_sum(out_BLD, response_at, response, batch, "response"),
        ]
        # OpenTau's means are over all slots, padding too.
        slots = [tokens_Bn[:, 1:].size for tokens_Bn in (memory, response)]
        loss = sums[0] / slots[0] + sums[1] / slots[1]
        return {
            "MSE": paddle.zeros_like(loss),
            "CE": loss,
            "CE_memory_sum": sums[0],
            "CE_response_sum": sums[1],
        }

    def _segment_loss_sum(
        self, out_BLD: Tensor, begin: int, tokens_Bn: Tensor, batch: Mapping[str, Any], name: str
    ) -> Tensor:
        """Summed cross entropy of a segment that begins at row `begin` of the prefix.

        Each token predicts the next; no token predicts the first.
        """
        rows_TD = out_BLD[:, begin : begin + tokens_Bn.shape[1] - 1].reshape(
            [-1, out_BLD.shape[-1]]
        )
        found_2R = batch.get(f"{name}_target_rows")
        if found_2R is None:
            masks_Bn, tokens = batch[f"{name}_masks"], tokens_Bn[:, 1:]
            ignored = paddle.full_like(tokens, IGNORE_INDEX)
            targets_T = paddle.where(masks_Bn[:, 1:], tokens, ignored).reshape([-1])
            targets = TargetRows(paddle.arange(targets_T.shape[0]), targets_T)
        else:
            targets = TargetRows(found_2R[0], found_2R[1])
        ops, trains = self.placement.ops, f"CE_{name}" not in self.untrained_losses
        with paddle.set_grad_enabled(trains and paddle.is_grad_enabled()):
            return head_loss(self.lm_head, ops.enter_head(rows_TD), targets, ops.vocabulary)

    def head(self, rows: Tensor) -> Tensor:
        """Logits `[..., V]` of rows `[..., D]`, or this rank's vocabulary shard of them."""
        return self.lm_head(self.placement.ops.enter_head(rows))

    @paddle.no_grad()
    def generate(
        self, batch: Mapping[str, Any], bos_id: int, eos_id: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Greedily decoded memory and response, each int64 `[B, length]` as configured, of a batch
        without them. Both begin with `bos_id` and have padding after `eos_id`."""
        if self.placement.splits_parameters:
            raise ValueError(
                "this model is one rank's shard of a model; to generate, load the checkpoint in a "
                "single process"
            )
        presence, batch = presence_of(batch), as_tensors(batch)
        prefix = self.prefix(batch, presence, training=False)
        rules = WritingRules(
            self.config.memory_max_length,
            self.config.response_max_length,
            self.tokens.label_ids[RESPONSE_LABEL],
            bos_id,
            eos_id,
            PAD_ID,
        )
        reader = _Reader(self, prefix, rules.num_tokens)
        return write_plan(reader, prefix.embs.shape[0], rules)


class _Reader:
    """Keys and values of all tokens read so far, with room for `num_tokens` behind the prefix; see
    `TokenReader`."""

    def __init__(self, model: PI07HighLevelPlannerModel, prefix: Prefix, num_tokens: int):
        self.model, self.pad_BL = model, prefix.pad_masks
        self.embed_tokens = model.prefix.embed_tokens
        output = model.decoder(prefix.embs, prefix_view=model.prefix_view(prefix), keep=True)
        self.last_B1D, kept = output.prefix[:, -1:], output.cache
        length = self.pad_BL.shape[1]
        self.caches = [(KeyValueCache(length, length + num_tokens),) for _ in kept]
        for (cache,) in self.caches:
            cache.append(*kept.pop(0))

    def read(self, ids_Bn: np.ndarray, is_real_Bn: np.ndarray) -> None:
        ids, pad_Bn = paddle.to_tensor(ids_Bn), paddle.to_tensor(is_real_Bn)
        decoder = self.model.decoder
        marks = paddle.ones(pad_Bn.shape, dtype="bool")
        mask = suffix_mask(self.pad_BL, pad_Bn, marks)
        self.pad_BL = paddle.concat([self.pad_BL, pad_Bn], axis=1)
        positions_BS = prefix_positions(self.pad_BL)
        view = decoder.view(positions_BS[:, -pad_Bn.shape[1] :], mask, positions_BS)
        rows = self.embed_tokens(ids)
        self.last_B1D = decoder(rows, prefix_view=view, cache=self.caches).prefix[:, -1:]

    def next_tokens(self) -> np.ndarray:
        return self.model.head(self.last_B1D).argmax(axis=-1).numpy()


class PI07HighLevelPlanner(BasePolicy):
    """The planner's model with its tokenizer and the normalizer of its inputs."""

    config: PI07PlannerConfig
    model: PI07HighLevelPlannerModel
    config_class = PI07PlannerConfig
    model_class = PI07HighLevelPlannerModel
    # OpenTau's engine has these in every policy.
    unused_keys = ("*.da_head.*", "*.discrete_action_embedding.*")

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The losses of raw demonstrations."""
        return self.model(self.inputs.training_inputs(batch))

    @property
    def inputs(self) -> PlannerInputs:
        return PlannerInputs(self.config, self.tokenizer, self.normalizers["normalize_inputs"])

    def plan(self, batch: Mapping[str, Any]) -> Plan:
        """Greedily decoded memory and subtask for raw observations."""
        self.eval()
        eos_id, bos_id = self.tokenizer.token_id(EOS), self.tokenizer.token_id(BOS)
        written = self.model.generate(self.inputs.observation_inputs(batch), bos_id, eos_id)
        return plan_of(written, self.tokenizer, eos_id)
