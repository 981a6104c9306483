"""pi07's models: what those of policy and planner have in common, and the low-level policy's, flow
matching of action chunks by an expert that reads the prefix.

Time t = 1 is noise and t = 0 the actions: `x_t = t * noise + (1 - t) * actions`. The expert learns
the velocity `noise - actions`; sampling integrates it from noise to actions. The discrete action
tokens at the end of the prefix train the backbone at the same time.

Shapes: B batch, F frames of the history, C steps of a chunk, A action values, S state values, L
prefix tokens (L_a action tokens among them), D backbone width, E expert width, V action-token
vocabulary.

Source: PI07LowLevelFlowMatching of OpenTau; flow matching as in pi0 (Black et al., 2024), the
action tokens and knowledge insulation as in pi0.5-KI (Driess et al., 2025).
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_vl.checkpoint.reading import Materializable, MaterializeStep, drawn_values
from paddle_vl.checkpoint.rules import StoredParameter, place_parameters
from paddle_vl.families.hf_interface import AdaptableModel
from paddle_vl.families.pi07.checkpoint_map import checkpoint_rules, is_trained
from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.decoder import (
    DecoderOutput,
    InterleavedDecoder,
    KeyValue,
    SharedConditions,
    StreamView,
    SuffixView,
    prefix_positions,
    suffix_positions,
)
from paddle_vl.families.pi07.prefix import (
    PREFIX_BLOCKS,
    Block,
    GroupedProjection,
    Prefix,
    PrefixEmbedding,
    PrefixTokens,
    Presence,
    presence_of,
)
from paddle_vl.nn.attention_masks import BlockMask, KeyMask
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.placement import Placement, SingleDevicePlacement
from paddle_vl.nn.transfer import device_tensor, host_table

if TYPE_CHECKING:
    from paddle_vl.config.schema import LoRAConfig

Model = TypeVar("Model", bound="PolicyModel")

# Shortest and longest period of the time embedding.
_SHORTEST, _LONGEST = 4e-3, 4.0


class PolicyModel(AdaptableModel, Materializable, nn.Layer):
    """A model, or this rank's shards and layers of it.

    Attributes:
        blocks, tokens: layout of the prefix, and its lengths and masks.
        prefix: its embedding, a `PrefixEmbedding`; on pipeline stages without it None, or its tower
            alone.
        untrained_losses: losses that are computed without gradients.
    """

    blocks: ClassVar[tuple[Block, ...]]
    # Adapters have the names of a policy's parameters, not of its model's.
    adapter_prefix = "model."
    output_module = "model.gemma3_with_expert.da_head"
    # Entries of a batch that are drawn if it has none.
    drawn: ClassVar[tuple[str, ...]] = ()
    prefix: Any
    decoder: InterleavedDecoder
    untrained_losses: frozenset[str] = frozenset()

    def __init__(
        self,
        config: PI07Config | PI07PlannerConfig,
        label_ids: Mapping[str, Sequence[int]],
        placement: Placement | None = None,
    ):
        """
        Args:
            label_ids: token ids, without special tokens, of each label of `blocks`.
        """
        super().__init__()
        self.config, self.label_ids = config, label_ids
        self.placement = placement or SingleDevicePlacement()
        camera_tokens = config.vlm_config.gemma3_config.mm_tokens_per_image
        self.tokens, self.prefix = PrefixTokens(self.blocks, label_ids, camera_tokens), None
        if self.placement.stage_layers.tower:
            self.prefix = PrefixEmbedding(config, self.tokens, self.placement)

    def finish(self) -> None:
        """Register and freeze parameters, once all of them are made."""
        self.placement.parameter_table.add_replicated(self.parameters())
        for name, parameter in self.named_parameters():
            parameter.stop_gradient = not is_trained(name, self.config.vlm_config)

    def forward(
        self,
        batch: Mapping[str, Any],
        presence: Presence | None = None,
        per_sample: bool = False,
    ) -> dict[str, Any]:
        """The losses of a batch, see `losses`.

        Args:
            batch: NumPy arrays or tensors, see the model's class; lists have an entry per camera.
                Token ids are int64, masks bool (True: real, not padding), all else float32.
            presence: the optional fields to lay out; None for those with content in the batch.
            per_sample: also the policy's `MSE_per_sample` and `CE_per_sample`.
        """
        presence = presence_of(batch) if presence is None else presence
        batch = self.with_draws(as_tensors(batch))
        prefix = self.prefix(batch, presence)
        rows, views = self.suffix_rows(batch), self.views(prefix)
        out = self.decoder(prefix.embs, *rows, *views)
        losses = self.losses(out, batch)
        return losses if per_sample else {n: x for n, x in losses.items() if "_per_" not in n}

    def with_draws(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The batch, on the device, with what is drawn for all parts of a step."""
        return batch

    def views(self, prefix: Prefix) -> tuple[StreamView, SuffixView | None]:
        """Of both streams in training."""
        return self.prefix_view(prefix), None

    def suffix_rows(self, batch: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Rows of the suffix and the condition of its norms; None without one."""
        return None, None

    @abstractmethod
    def losses(self, out: DecoderOutput, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The losses by name, from the output of the decoder."""

    @property
    def decoder_layers(self) -> list[nn.Layer]:
        """This rank's decoder layers, the units of recomputation and parameter sharding."""
        layers = enumerate(self.decoder.layers)
        return [layer for i, layer in layers if self.placement.stage_layers.has_layer(i)]

    @property
    def vision_blocks(self) -> list[nn.Layer]:
        """This rank's tower layers, units of the same kind."""
        return [] if self.prefix is None else list(self.prefix.video_encoder.tower.layers)

    @property
    def tables(self) -> list[nn.Layer]:
        """This rank's token embedding and vocabulary head; tied ones share their `weight`."""
        layers = []
        if self.placement.stage_layers.embedding:
            layers.append(self.prefix.embed_tokens.table)
        head = getattr(self, "lm_head", None)
        return layers if head is None else [*layers, head]

    def prefix_view(self, prefix: Prefix) -> StreamView:
        pad_BL = prefix.pad_masks
        return self.decoder.view(prefix_positions(pad_BL), BlockMask(pad_BL, prefix.att_masks))

    def stored_parameters(self) -> list[StoredParameter]:
        """This rank's parameters with checkpoint keys, without `model.`, and their shards.

        Each parameter is listed once, a fused one once for each of its linears.
        """
        rules = checkpoint_rules(self.config.vlm_config, self.config.per_group_projection)
        return place_parameters(self.named_parameters(), rules, self.placement.parameter_table)

    def whole(self: Model) -> Model:
        """The unsharded model, its parameters without storage; this one if it is not sharded."""
        if not self.placement.splits_parameters:
            return self
        with paddle.LazyGuard():
            return type(self)(self.config, self.label_ids).with_adapter_of(self)

    @property
    def adapter_parts(self) -> Mapping[str, Sequence[str]]:
        from paddle_vl.families.pi07.settings import PARTS

        return PARTS

    def add_lora(self, config: "LoRAConfig") -> None:
        super().add_lora(config)
        vlm = self.config.vlm_config
        named = self.whole().named_parameters()
        frozen = [n for n, p in named if not p.stop_gradient and not is_trained(n, vlm)]
        if frozen:
            raise ValueError(
                f"model.lora trains {len(frozen)} parameters that the policy's configuration "
                f"freezes, such as {frozen[0]}: set model.policy.freeze_vision_encoder, "
                "train_expert_only and the like to false, or leave them out of target_modules and "
                "modules_to_save"
            )

    def fresh_values(self, keys: Collection[str] | None = None) -> list[MaterializeStep]:
        """Steps that draw initial values, of these keys or all, from Paddle's global random state.

        The model must have been built under `paddle.LazyGuard`. A rank gets its shards of what a
        single device draws with the same seed.
        """

        def chosen(model: PolicyModel) -> list[StoredParameter]:
            return [p for p in model.base_parameters() if keys is None or p.key in keys]

        splits = self.placement.splits_parameters
        return drawn_values(chosen(self), chosen(self.whole()) if splits else None)


def as_tensors(values: Any) -> Any:
    """NumPy arrays as tensors, in nested mappings and lists; other values unchanged."""
    if isinstance(values, Mapping):
        return {name: as_tensors(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [as_tensors(value) for value in values]
    return device_tensor(np.asarray(values) if isinstance(values, np.generic) else values)


class NoisyActions(NamedTuple):
    """A point on the way from noise to actions.

    Attributes:
        x_t, velocity: `[B, C, A]` float32.
        time: `[B, C]` float32; 0 at delayed steps, whose actions are known.
        is_delayed: `[B, C]` bool.
    """

    x_t: Tensor
    velocity: Tensor
    time: Tensor
    is_delayed: Tensor


def draw_time(size: int) -> Tensor:
    """`[B]` float32 times, 0.001 + 0.999 Beta(1.5, 1), drawn by inverse transform sampling."""
    return paddle.uniform([size], dtype="float32", min=0.0, max=1.0) ** (1 / 1.5) * 0.999 + 0.001


@host_table
def _time_frequencies(num: int) -> np.ndarray:
    fraction = np.linspace(0.0, 1.0, num)
    return 2 * np.pi / (_SHORTEST * (_LONGEST / _SHORTEST) ** fraction)


def time_embedding(time: Tensor, width: int) -> Tensor:
    """Sine and cosine of `2 pi time / period`, float64 `[..., width]` of times `[...]`.

    Periods are geometric from 0.004 to 4.

    Source: create_sinusoidal_pos_embedding of OpenTau and openpi.
    """
    angle = time.astype("float64").unsqueeze(-1) * _time_frequencies(width // 2)
    return paddle.concat([paddle.sin(angle), paddle.cos(angle)], axis=-1)


class SuffixEmbedding(nn.Layer):
    """Rows of the expert from noisy actions, and the condition of its norms from their time.

    Source: `embed_suffix` of OpenTau's PI07LowLevelFlowMatching.
    """

    def __init__(self, config: PI07Config, num_groups: int | None):
        super().__init__()
        width = config.proj_width
        self.action_in_proj = GroupedProjection(config.max_action_dim, width, num_groups)
        self.time_mlp_in = Linear(width, width, True, bound=width**-0.5)
        self.time_mlp_out = Linear(width, width, True, bound=width**-0.5)

    def forward(
        self, noisy_BCA: Tensor, time: Tensor, group_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows `[B, C, E]`, and conditions `[..., E]` of times `[...]`."""
        dtype = self.time_mlp_in.weight.dtype
        rows_BCE = self.action_in_proj(noisy_BCA.astype(dtype), group_B)
        code = time_embedding(time, rows_BCE.shape[-1]).astype(dtype)
        return rows_BCE, F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(code))))


def flow_counts(
    is_delayed_BC: Tensor,
    num_values: int,
    is_pad_BC: Tensor | None = None,
    real_dim_B: Tensor | None = None,
) -> Tensor:
    """Mask of the flow loss, `[B, C, A]` bool: not delayed, not padding, of the robot's
    `real_dim_B` first dims."""
    counts_BC = paddle.logical_not(is_delayed_BC)
    if is_pad_BC is not None:
        counts_BC = paddle.logical_and(counts_BC, paddle.logical_not(is_pad_BC))
    counts_BCA = counts_BC.unsqueeze(-1).expand([*counts_BC.shape, num_values])
    if real_dim_B is None:
        return counts_BCA
    in_use = paddle.arange(num_values) < real_dim_B.astype("int64").unsqueeze([1, 2])
    return paddle.logical_and(counts_BCA, in_use)


class GivenActions:
    """The first `delay` steps of a chunk, which are known: those that run while it is computed.

    Args:
        action_prefix: `[B, C, A]`; None if there are none.
        delay: a number, or int64 `[1]`.
    """

    def __init__(
        self,
        action_prefix: Tensor | None,
        num_samples: int | Tensor,
        num_steps: int,
        delay: int | Tensor,
    ):
        self.action_prefix = action_prefix
        self._is_given_1C = (paddle.arange(num_steps) < delay).unsqueeze(0)
        is_given_BC = self._is_given_1C.expand([num_samples, num_steps])
        self._time_index_T = is_given_BC.astype("int64").flatten()
        self._is_free_2 = paddle.to_tensor([1.0, 0.0])

    def times(self, time: float | Tensor) -> Tensor:
        """Time of the free steps and of the known ones, `[2]`."""
        return self._is_free_2 * time

    def conditions(self, values_2E: Tensor) -> SharedConditions:
        """Conditions of all steps from those of the two `times`."""
        return SharedConditions(values_2E, self._time_index_T)

    def put(self, x_BCA: Tensor) -> Tensor:
        """The chunk with the known steps in place."""
        if self.action_prefix is None:
            return x_BCA
        given_BCA = self.action_prefix.astype(x_BCA.dtype)
        return paddle.where(self._is_given_1C.unsqueeze(-1), given_BCA, x_BCA)


def time_step(num_steps: int) -> np.float32:
    """Euler step of the time; negative, since it runs from noise at 1 to actions at 0."""
    return np.float32(-1.0 / num_steps)


def times(num_steps: int) -> list[np.float32]:
    """Times of the Euler steps, accumulated in float32 as OpenTau does."""
    step, time, found = time_step(num_steps), np.float32(1.0), []
    while time >= -step / 2:
        found.append(time)
        time = np.float32(time + step)
    return found


class PI07LowLevelFlowMatching(PolicyModel):
    """Prefix and suffix embeddings, the decoder of both streams, and the two heads.

    Tensor parallelism shards the decoder layers and the token table; all else is replicated. The
    first pipeline stage has the embeddings, the last one the heads.

    Batches: `videos`, a list of `[B, F, 3, H, W]` in [0, 1], the current frame last, with
    `vid_masks`, a list of `[B]`; `lang_tokens` and `lang_masks`; `state` `[B, F, S]`; `actions`
    `[B, C, A]`; `discrete_actions` and `discrete_action_masks`.
    Optional: `response_tokens` and `response_masks`; `metadata_tokens` and `metadata_masks`;
    `subgoal_images`, a list of `[B, 3, H, W]` in [-1, 1], with `subgoal_img_masks`;
    `obs_history_is_pad` `[B, F]` (without it, the past is padding); `actions_is_pad` `[B, C]`;
    `real_action_dim` `[B]`; `group_index` `[B]`.
    Drawn if absent: `noise` `[B, C, A]`, `time` `[B]`, `delay` `[B]`.
    """

    config: PI07Config
    blocks = PREFIX_BLOCKS
    drawn = ("noise", "time", "delay")
    # None on pipeline stages without them.
    suffix: Any
    da_head: Any
    action_out_proj: Any

    def __init__(
        self,
        config: PI07Config,
        label_ids: Mapping[str, Sequence[int]],
        placement: Placement | None = None,
    ):
        super().__init__(config, label_ids, placement)
        num_groups = config.num_groups if config.per_group_projection else None
        vlm, stage = config.vlm_config, self.placement.stage_layers
        self.suffix, self.da_head, self.action_out_proj = None, None, None
        if stage.embedding:
            self.suffix = SuffixEmbedding(config, num_groups)
        self.decoder = InterleavedDecoder(vlm, self.placement)
        if stage.head:
            assert vlm.discrete_action_vocab_size is not None, "the first stage refuses None"
            width = vlm.gemma3_config.text_config.hidden_size
            self.da_head = Linear(width, vlm.discrete_action_vocab_size, True, bound=width**-0.5)
            self.action_out_proj = GroupedProjection(
                config.proj_width, config.max_action_dim, num_groups
            )
        self.finish()
        self.train()

    def train(self) -> None:
        super().train()
        if self.config.vlm_config.train_state_action_representation_only:
            # A frozen decoder has no dropout either.
            self.decoder.eval()

    def with_draws(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**batch, "noisy": self.noisy_actions(batch)}

    def noisy_actions(self, batch: Mapping[str, Any]) -> NoisyActions:
        """Actions mixed with noise; draws noise, times and delays if the batch has none."""
        actions = batch["actions"].astype("float32")
        size, steps, _ = actions.shape
        noise, time_B, delay_B = (batch.get(name) for name in self.drawn)
        noise = paddle.randn(actions.shape, dtype="float32") if noise is None else noise
        time_B = draw_time(size) if time_B is None else time_B
        if delay_B is None:
            delay_B = paddle.randint(0, self.config.max_delay + 1, [size], dtype="int64")
        is_delayed = paddle.arange(steps) < delay_B.unsqueeze(1)
        time_BC = time_B.unsqueeze(1) * paddle.logical_not(is_delayed).astype("float32")
        weight = time_BC.unsqueeze(-1)
        x_t = weight * noise + (1.0 - weight) * actions
        return NoisyActions(x_t, noise - actions, time_BC, is_delayed)

    def suffix_rows(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        noisy = batch["noisy"]
        return self.suffix(noisy.x_t, noisy.time, batch.get("group_index"))

    def views(self, prefix: Prefix) -> tuple[StreamView, SuffixView]:
        return self.training_view(prefix), self.suffix_view(prefix.pad_masks[:, : prefix.num_seen])

    def training_view(self, prefix: Prefix) -> StreamView:
        """`prefix_view`, of which only the rows are output that predict action tokens.

        Under sequence parallelism these are not evenly divided over the ranks, so all are output.
        """
        view = self.prefix_view(prefix)
        if self.placement.ops.row_part.size == 1:
            view.output_only(self._predicting_rows(prefix.pad_masks.shape[1]))
        return view

    def _predicting_rows(self, num_tokens: int) -> slice:
        """Rows of the tokens before each action token."""
        return slice(num_tokens - 1 - self.config.discrete_action_max_length, num_tokens - 1)

    def suffix_view(self, seen_BL: Tensor) -> SuffixView:
        # A chunk is one block without padding: every step sees the prefix and all steps.
        steps = self.config.chunk_size
        own_BC = paddle.ones([seen_BL.shape[0], steps], dtype="bool")
        mask = KeyMask(paddle.concat([seen_BL, own_BC], axis=1), steps)
        own = self.decoder.view(suffix_positions(seen_BL, steps), mask)
        return SuffixView(own, seen_BL.shape[1], self.config.knowledge_insulation)

    def losses(self, out: DecoderOutput, batch: Mapping[str, Any]) -> dict[str, Any]:
        """`MSE` of the flow and `CE` of the action tokens, scalars; `MSE_per_sample` and
        `CE_per_sample`, pairs of sums and counts `[B]`."""
        noisy, config = batch["noisy"], self.config
        given = batch.get("actions_is_pad"), batch.get("real_action_dim")
        counts_BCA = flow_counts(noisy.is_delayed, config.max_action_dim, *given).astype("float32")
        velocity_BCA = self.velocity(out.suffix, batch.get("group_index"))
        squares_BCA = (noisy.velocity - velocity_BCA).square() * counts_BCA
        logits_BLV, tokens_BL = self.action_token_logits(out.prefix), batch["discrete_actions"]
        masks_BL = batch["discrete_action_masks"].astype("float32")
        losses_T = F.cross_entropy(
            logits_BLV.flatten(0, 1).astype("float32"), tokens_BL.flatten(), reduction="none"
        )
        losses_BL = losses_T.reshape(masks_BL.shape) * masks_BL
        return {
            "MSE": squares_BCA.sum() / (counts_BCA.sum() + 1e-8),
            # As in OpenTau, the mean includes padding.
            "CE": losses_BL.mean(),
            "MSE_per_sample": (squares_BCA.sum(axis=[1, 2]), counts_BCA.sum(axis=[1, 2])),
            "CE_per_sample": (losses_BL.sum(axis=1), masks_BL.sum(axis=1)),
        }

    def velocity(self, suffix_BCE: Tensor, group_B: Tensor | None = None) -> Tensor:
        return self.action_out_proj(suffix_BCE, group_B).astype("float32")

    def action_token_logits(self, prefix_BLD: Tensor) -> Tensor:
        """Logits `[B, L_a, V]` of the action tokens, each from the token before it; from all rows
        of the prefix, or only these."""
        if prefix_BLD.shape[1] != self.config.discrete_action_max_length:
            prefix_BLD = prefix_BLD[:, self._predicting_rows(prefix_BLD.shape[1])]
        return self.da_head(prefix_BLD)

    @paddle.no_grad()
    def sample_actions(
        self,
        batch: Mapping[str, Any],
        noise: Any = None,
        delay: int = 0,
        action_prefix: Any = None,
        num_steps: int | None = None,
    ) -> Tensor:
        """A chunk of actions `[B, C, A]` float32, by Euler steps from noise, drawn if None.

        The prefix runs once; each step runs the expert over its cached keys and values.

        Args:
            batch: see `forward`, without actions.
            action_prefix: `[B, C, A]`, whose first `delay` steps are known.
            num_steps: number of Euler steps; None for the configuration's.
        """
        if not self.placement.stage_layers.is_full:
            raise ValueError(
                "this model is one stage of a pipeline; to act, load the checkpoint in a single "
                "process"
            )
        config, presence, batch = self.config, presence_of(batch), as_tensors(batch)
        noise, action_prefix = as_tensors([noise, action_prefix])
        num_steps, group_B = num_steps or config.num_steps, batch.get("group_index")
        prefix = self.prefix(batch, presence, training=False)
        cache = self.decoder(prefix.embs, prefix_view=self.prefix_view(prefix), keep=True).cache
        suffix_view = self.suffix_view(prefix.pad_masks[:, : prefix.num_seen])
        shape = [prefix.embs.shape[0], config.chunk_size, config.max_action_dim]
        x_BCA = paddle.randn(shape, dtype="float32") if noise is None else noise
        given = GivenActions(action_prefix, shape[0], config.chunk_size, delay)
        step = float(time_step(num_steps))
        for time in times(num_steps):
            x_BCA = self.euler_step(x_BCA, float(time), step, given, suffix_view, cache, group_B)
        return given.put(x_BCA)

    def euler_step(
        self,
        x_BCA: Tensor,
        time: float | Tensor,
        step: float | Tensor,
        given: "GivenActions",
        view: SuffixView,
        cache: Sequence[KeyValue],
        group_B: Tensor | None = None,
    ) -> Tensor:
        """The actions `[B, C, A]` one step later; `time` and `step` may be float32 `[1]`."""
        x_BCA = given.put(x_BCA)
        rows_BCE, values_2E = self.suffix(x_BCA, given.times(time), group_B)
        conditions = given.conditions(values_2E)
        out = self.decoder(None, rows_BCE, conditions, suffix_view=view, cache=cache)
        return x_BCA + self.velocity(out.suffix, group_B) * step
