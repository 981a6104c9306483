"""The low-level policy's model: what it sees and reads, and the flow from noise to actions.

Shapes: B batch, T steps of history, C steps of a chunk, A action values, S state values, L prefix
tokens, D backbone width, E expert width.

Time 1 is noise and time 0 the actions: `x_t = t * noise + (1 - t) * actions`, and the expert learns
the velocity `noise - actions`.

Source: PI07LowLevelFlowMatching of OpenTau.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.families.pi07.attention_masks import suffix_mask, suffix_positions
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.freeze import freeze, uses_dropout
from paddle_vl.families.pi07.group_linear import GroupedProjection
from paddle_vl.families.pi07.interleaved import DecoderOutput, InterleavedDecoder, SuffixView
from paddle_vl.families.pi07.losses import LossTerms, flow_counts, flow_loss, token_slot_loss
from paddle_vl.families.pi07.placed_model import PlacedModel
from paddle_vl.families.pi07.prefix import Prefix, PrefixEmbedding
from paddle_vl.families.pi07.prefix_layout import PREFIX_BLOCKS, Presence, presence_of
from paddle_vl.families.pi07.prefix_tokens import PrefixMasks, PrefixTokens
from paddle_vl.families.pi07.sampling import sample_actions
from paddle_vl.families.pi07.suffix import SuffixEmbedding
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.placement import Placement


class NoisyActions(NamedTuple):
    """A point on the way from noise to actions.

    Attributes:
        x_t, velocity: `[B, C, A]` float32.
        time: `[B, C]` float32, 0 at steps that are given in advance.
        is_delayed: `[B, C]` bool, those steps.
    """

    x_t: Tensor
    velocity: Tensor
    time: Tensor
    is_delayed: Tensor


class PI07LowLevelFlowMatching(PlacedModel):
    """Prefix and suffix embeddings, the decoder of both streams, and the two heads.

    What lies outside of the decoder's layers is whole on every rank but the token table, and all
    ranks of a model-parallel group compute the same of it. Of the ranks of a pipeline the first has
    the embeddings and the last the heads.
    """

    def __init__(
        self,
        config: PI07Config,
        label_ids: Mapping[str, Sequence[int]],
        placement: Placement | None = None,
    ):
        """
        Args:
            label_ids: token ids, without special tokens, of each of `prefix_layout.LABELS`.

        Raises:
            ValueError: a label has no ids, or the vocabulary of discrete actions is not known.
        """
        super().__init__(config, label_ids, placement)
        num_groups = config.num_groups if config.per_group_projection else None
        vlm = config.vlm_config
        width = vlm.gemma3_config.text_config.hidden_size
        camera_tokens = vlm.gemma3_config.mm_tokens_per_image
        self.tokens = PrefixTokens(PREFIX_BLOCKS, label_ids, camera_tokens)
        self.prefix, self.suffix, self.da_head, self.action_out_proj = None, None, None, None
        if self.placement.stage_layers.embedding:
            self.prefix = PrefixEmbedding(config, self.tokens, num_groups, self.placement)
            self.suffix = SuffixEmbedding(config, num_groups)
        self.decoder = InterleavedDecoder(vlm, self.placement)
        if self.placement.stage_layers.head:
            self.da_head = Linear(width, vlm.discrete_action_vocab_size, True)
            self.action_out_proj = GroupedProjection(
                config.proj_width, config.max_action_dim, num_groups
            )
        self.placement.parameter_table.add_replicated(self.parameters())
        freeze(self, vlm)
        self.train()

    def train(self) -> None:
        super().train()
        if not uses_dropout(self.config.vlm_config):
            self.decoder.eval()

    def forward(
        self,
        batch: Mapping[str, Any],
        presence: Presence | None = None,
        per_sample: bool = False,
    ) -> dict[str, Any]:
        """The losses of a batch.

        Args:
            batch: NumPy arrays or tensors, lists with an entry for each camera. `videos`
                `[B, T, 3, H, W]` in [0, 1], the current frame last, `vid_masks` `[B]`;
                `lang_tokens`, `lang_masks`; `state` `[B, T, S]`; `actions` `[B, C, A]`;
                `discrete_actions`, `discrete_action_masks`. If there are any: `response_tokens`,
                `response_masks`, `metadata_tokens`, `metadata_masks`, `subgoal_images`
                `[B, 3, H, W]` in [-1, 1], `subgoal_img_masks`, `obs_history_is_pad` `[B, T]`
                (None takes the past for padding), `actions_is_pad` `[B, C]`, `real_action_dim`
                `[B]`, `group_index` `[B]`. Drawn if not given: `noise` `[B, C, A]`, `time` `[B]`,
                `delay` `[B]`. Tokens are int64 and masks bool, True for what is real.
            presence: which optional parts to lay out; None for those that the batch has.
            per_sample: add sums and counts of every sample.

        Returns:
            `MSE` and `CE`, scalars; `MSE_per_sample` and `CE_per_sample`, pairs of `[B]`.
        """
        presence = presence_of(batch) if presence is None else presence
        batch = as_tensors(batch)
        noisy = self.noisy_actions(batch)
        prefix = self.prefix(batch, presence)
        out = self.decode(prefix, noisy, batch.get("group_index"))
        losses = self.losses(out, noisy, batch)
        return losses if per_sample else {name: losses[name] for name in ("MSE", "CE")}

    def noisy_actions(self, batch: Mapping[str, Any]) -> NoisyActions:
        """Actions mixed with noise; what the batch does not give of these is drawn."""
        actions = batch["actions"].astype("float32")
        size, steps, _ = actions.shape
        noise, time_B, delay_B = (batch.get(name) for name in ("noise", "time", "delay"))
        noise = paddle.randn(actions.shape, dtype="float32") if noise is None else noise
        time_B = draw_time(size) if time_B is None else time_B
        if delay_B is None:
            delay_B = paddle.randint(0, self.config.max_delay + 1, [size], dtype="int64")
        is_delayed = paddle.arange(steps) < delay_B.unsqueeze(1)
        time_BC = time_B.unsqueeze(1) * paddle.logical_not(is_delayed).astype("float32")
        weight = time_BC.unsqueeze(-1)
        x_t = weight * noise + (1.0 - weight) * actions
        return NoisyActions(x_t, noise - actions, time_BC, is_delayed)

    def decode(
        self, prefix: Prefix, noisy: NoisyActions, group_B: Tensor | None = None
    ) -> DecoderOutput:
        """Both streams at once."""
        rows, cond = self.suffix(noisy.x_t, noisy.time, group_B)
        return self.decoder(
            prefix.embs, rows, cond, self.prefix_view(prefix), self.suffix_view(prefix)
        )

    def suffix_view(self, prefix: Prefix | PrefixMasks) -> SuffixView:
        """Positions and mask of a chunk of actions behind a prefix."""
        steps = self.config.chunk_size
        seen_BL = prefix.pad_masks[:, : prefix.num_seen]
        pad_BC = paddle.ones([seen_BL.shape[0], steps], dtype="bool")
        own = self.decoder.view(
            suffix_positions(seen_BL, steps),
            suffix_mask(seen_BL, pad_BC, suffix_marks(pad_BC)),
        )
        return SuffixView(own, prefix.num_seen, self.config.knowledge_insulation)

    def losses(
        self, out: DecoderOutput, noisy: NoisyActions, batch: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What `forward` returns, with sums and counts of every sample."""
        flow = self.flow_terms(out.suffix, noisy, batch)
        tokens = token_slot_loss(
            self.action_token_logits(out.prefix),
            batch["discrete_actions"],
            batch["discrete_action_masks"],
        )
        return {
            "MSE": flow.mean,
            "CE": tokens.mean,
            "MSE_per_sample": (flow.sums, flow.counts),
            "CE_per_sample": (tokens.sums, tokens.counts),
        }

    def velocity(self, suffix_BCE: Tensor, group_B: Tensor | None = None) -> Tensor:
        """The expert's rows to velocities, float32 `[B, C, A]`."""
        return self.action_out_proj(suffix_BCE, group_B).astype("float32")

    def flow_terms(
        self, suffix_BCE: Tensor, noisy: NoisyActions, batch: Mapping[str, Any]
    ) -> LossTerms:
        """The loss of the velocity."""
        counts = flow_counts(
            noisy.is_delayed,
            self.config.max_action_dim,
            batch.get("actions_is_pad"),
            batch.get("real_action_dim"),
        )
        velocity = self.velocity(suffix_BCE, batch.get("group_index"))
        return flow_loss(noisy.velocity, velocity, counts)

    def action_token_logits(self, prefix_BLD: Tensor) -> Tensor:
        """Logits of the discrete actions, each from the token before: `[B, L_actions, V]`."""
        length = self.config.discrete_action_max_length
        end = prefix_BLD.shape[1] - 1
        return self.da_head(prefix_BLD[:, end - length : end])

    def sample_actions(
        self,
        batch: Mapping[str, Any],
        noise: Any = None,
        delay: int = 0,
        action_prefix: Any = None,
        num_steps: int | None = None,
    ) -> Tensor:
        """A chunk of actions, `[B, C, A]` float32, by Euler steps from noise.

        Args:
            batch: as for `forward`, without actions.
            noise: `[B, C, A]`; drawn if None.
            delay: so many first steps are already settled.
            action_prefix: `[B, C, A]`, these steps; the others do not matter.
            num_steps: of the integration; None for the configuration's.

        Raises:
            ValueError: the model is a part of a pipeline.
        """
        if not self.placement.stage_layers.is_full:
            raise ValueError(
                "this model is one stage of a pipeline; to act, load the checkpoint in a single "
                "process"
            )
        presence, batch = presence_of(batch), as_tensors(batch)
        noise, action_prefix = as_tensors([noise, action_prefix])
        return sample_actions(
            self, batch, presence, noise, delay, action_prefix, num_steps or self.config.num_steps
        )


def suffix_marks(pad_BC: Tensor) -> Tensor:
    """A chunk is one block: `[B, C]` bool."""
    steps = pad_BC.shape[1]
    return (paddle.arange(steps) == 0).unsqueeze(0).expand(pad_BC.shape)


def draw_time(size: int) -> Tensor:
    """`[B]` float32 times, 0.001 + 0.999 Beta(1.5, 1), by the inverse of its distribution."""
    return paddle.uniform([size], dtype="float32", min=0.0, max=1.0) ** (1 / 1.5) * 0.999 + 0.001


def as_tensors(values: Any) -> Any:
    """NumPy arrays as tensors, in mappings and lists."""
    if isinstance(values, Mapping):
        return {name: as_tensors(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [as_tensors(value) for value in values]
    return paddle.to_tensor(values) if isinstance(values, (np.ndarray, np.generic)) else values
