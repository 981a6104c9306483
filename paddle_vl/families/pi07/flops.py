"""FLOPs of pi07's models for a batch, counted for real frames, tokens and steps only.

Tower: patch embedding and layers for every patch of every real frame and goal image; attention
within a frame; in layers with temporal attention also between the same patch of real frames, causal
in time. Behind the last of these layers only current frames are left.
Backbone: linears for every real token of the prefix, attention for the visible pairs of its blocks,
heads at the real tokens that they predict. The output of the policy's last layer counts only at the
tokens before action tokens (sequence parallelism computes it at all tokens).
Expert: all steps of a chunk, which see each other and the real tokens before the action tail.

Real are: frames and states inside the episode (always the current one) of existing cameras; tokens
that are not masked; labels that are laid out. See `paddle_vl.families.flops` for what is counted.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paddle_vl.families.flops import FlopCounter, Operations
from paddle_vl.families.pi07.engine_config import Gemma3Config, Gemma3TextConfig, GemmaExpertConfig
from paddle_vl.families.pi07.prefix_layout import (
    PLANNER_BLOCKS,
    PREFIX_BLOCKS,
    Block,
    PrefixCounts,
    PrefixTokens,
    presence_of,
    real_frames,
)

_ENGINE = "model.gemma3_with_expert"
_BACKBONE = f"{_ENGINE}.gemma3.model"
_LANGUAGE = f"{_BACKBONE}.language_model"
_TOKEN_TABLE = f"{_LANGUAGE}.embed_tokens.weight"
# Units of rows, and of the pairs that they see.
_ALL_TOKENS = ("tokens", "token_pairs")
_PREDICTING = ("predicting_tokens", "predicting_pairs")


class _PrefixFlops(FlopCounter):
    """Counts the operations of batches of one of the two models, see `FlopCounter`.

    Args:
        label_ids: token ids of the prefix's labels, see the model.
        trained: checkpoint names of the trained parameters; None for all.
        losses: the computed ones; None for all.
    """

    blocks: ClassVar[tuple[Block, ...]]

    def __init__(
        self,
        config: Any,
        label_ids: Mapping[str, Sequence[int]],
        trained: Collection[str] | None = None,
        losses: Collection[str] | None = None,
    ):
        self.config = config
        camera_tokens = config.vlm_config.gemma3_config.mm_tokens_per_image
        self._tokens = PrefixTokens(self.blocks, label_ids, camera_tokens)
        self._operations = self._walk(Operations(trained), losses)

    def operations(self, batch: Mapping[str, Any]) -> Operations:
        return self._operations

    @abstractmethod
    def _walk(self, operations: Operations, losses: Collection[str] | None) -> Operations: ...

    def _prefix_units(
        self, batch: Mapping[str, Any], frames: int, frame_pairs: int, images: int
    ) -> tuple[dict[str, int], PrefixCounts]:
        """Units `patches`, `image_tokens`, and visible pairs of patches: `patch_pairs` in a frame,
        `time_pairs` in time; `current_patches` and `current_pairs` of output images alone; `tokens`
        of the prefix and `token_pairs`.

        Args:
            frames: input frames of the tower.
            frame_pairs: visible pairs of frames of a video.
            images: output images of the tower.
        """
        backbone = self.config.vlm_config.gemma3_config
        patches = backbone.vision_config.num_patches
        prefix = self._tokens.counts(batch, batch.get("presence") or presence_of(batch))
        return {
            "patches": frames * patches,
            "patch_pairs": frames * patches**2,
            "time_pairs": frame_pairs * patches,
            "current_patches": images * patches,
            "current_pairs": images * patches**2,
            "image_tokens": images * backbone.mm_tokens_per_image,
            "tokens": prefix.num_tokens,
            "token_pairs": prefix.num_pairs,
        }, prefix


class PI07Flops(_PrefixFlops):
    """Operations of the low-level policy, whose losses are `MSE` and `CE`."""

    blocks = PREFIX_BLOCKS

    def units(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Units of the prefix; `predicting_tokens`, those before action tokens, and
        `predicting_pairs`; `states`, `action_tokens`; `steps` of chunks, `step_pairs`, and
        `cross_pairs` of steps and prefix tokens."""
        real_BF = real_frames(batch, np)
        real_B = real_BF.sum(axis=1)
        cameras_B = _num_true(batch["vid_masks"])
        goals_B = _num_true(batch.get("subgoal_img_masks") or [np.zeros_like(real_B)])
        frame_pairs = 0
        if real_BF.shape[1] > 1:
            frame_pairs = int((cameras_B * (real_B * (real_B + 1) // 2)).sum())
        samples, steps = batch["actions"].shape[:2]
        frames = int((cameras_B * real_B + goals_B).sum())
        images = int((cameras_B + goals_B).sum())
        units, prefix = self._prefix_units(batch, frames, frame_pairs, images)
        return units | {
            "predicting_tokens": prefix.num_predicting,
            "predicting_pairs": prefix.predicting_pairs,
            "states": int(real_B.sum()),
            "action_tokens": int(batch["discrete_action_masks"].sum()),
            "steps": samples * steps,
            "step_pairs": samples * steps**2,
            "cross_pairs": steps * prefix.num_seen,
        }

    def _walk(self, operations: Operations, losses: Collection[str] | None) -> Operations:
        losses = ("MSE", "CE") if losses is None else losses
        config, vlm = self.config, self.config.vlm_config
        text = vlm.gemma3_config.text_config
        width, insulated = text.hidden_size, config.knowledge_insulation
        quiet = operations.without_backward()
        # Without knowledge insulation the flow loss also trains what the token loss trains.
        prefix = operations if "CE" in losses or not insulated else quiet
        tokens = operations if "CE" in losses else quiet
        actions = operations if "MSE" in losses else quiet
        rows = _tower(prefix, vlm.gemma3_config, config.spacetime_layer_stride)
        rows |= prefix.trains(_TOKEN_TABLE, f"{_ENGINE}.discrete_action_embedding.weight")
        rows |= prefix.linear("states", "model.state_proj", config.max_state_dim, width, False)
        steps = actions.linear(
            "steps", "model.action_in_proj", config.max_action_dim, config.proj_width, False
        )
        time = actions.linear(
            "steps", "model.time_mlp_in", config.proj_width, config.proj_width, False
        )
        time = actions.linear(
            "steps", "model.time_mlp_out", config.proj_width, config.proj_width, time
        )
        for i in range(text.num_hidden_layers):
            is_last = i == text.num_hidden_layers - 1
            rest = (tokens, _PREDICTING) if is_last else (prefix, _ALL_TOKENS)
            rows, key, value = _backbone_layer(prefix, *rest, text, i, rows)
            seen = (key and not insulated, value and not insulated)
            steps = _expert_layer(actions, vlm.gemma_expert_config, i, steps, time, seen)
        rows = tokens.norm(f"{_LANGUAGE}.norm", rows)
        assert vlm.discrete_action_vocab_size is not None, "the model's head has a size"
        tokens.linear(
            "action_tokens", f"{_ENGINE}.da_head", width, vlm.discrete_action_vocab_size, rows
        )
        steps |= _condition(
            actions, f"{_ENGINE}.gemma_expert.model.norm", vlm.gemma_expert_config, time
        )
        actions.linear(
            "steps", "model.action_out_proj", config.proj_width, config.max_action_dim, steps
        )
        return operations


class PI07PlannerFlops(_PrefixFlops):
    """Operations of the planner, whose losses are `CE_memory` and `CE_response`."""

    blocks = PLANNER_BLOCKS

    def units(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Units of the prefix; `memory_tokens` and `response_tokens`, the predicted ones: all but
        each segment's first."""
        images = int(_num_true(batch["img_masks"]).sum())
        units, _ = self._prefix_units(batch, images, 0, images)
        return units | {
            "memory_tokens": int(batch["memory_masks"][:, 1:].sum()),
            "response_tokens": int(batch["response_masks"][:, 1:].sum()),
        }

    def _walk(self, operations: Operations, losses: Collection[str] | None) -> Operations:
        backbone = self.config.vlm_config.gemma3_config
        text, layers = backbone.text_config, backbone.vision_config.num_hidden_layers
        rows = _tower(operations, backbone, layers + 1)
        rows |= operations.trains(_TOKEN_TABLE)
        for i in range(text.num_hidden_layers):
            rows, _, _ = _backbone_layer(operations, operations, _ALL_TOKENS, text, i, rows)
        rows = operations.norm(f"{_LANGUAGE}.norm", rows)
        for name in ("memory", "response"):
            computed = losses is None or f"CE_{name}" in losses
            counted = operations if computed else operations.without_backward()
            size = text.hidden_size * text.vocab_size
            counted.matrix(f"{name}_tokens", _TOKEN_TABLE, size, rows)
        return operations


def _tower(operations: Operations, backbone: Gemma3Config, stride: int) -> bool:
    """Count tower and projector; returns whether gradients reach their output."""
    vision, tower = backbone.vision_config, f"{_BACKBONE}.vision_tower.vision_model"
    width, inner, embeddings = vision.hidden_size, vision.intermediate_size, f"{tower}.embeddings"
    rows = operations.linear(
        "patches", f"{embeddings}.patch_embedding", 3 * vision.patch_size**2, width, False
    )
    rows |= operations.trains(f"{embeddings}.position_embedding.weight")
    num_with_past = vision.num_hidden_layers // stride * stride
    for i in range(vision.num_hidden_layers):
        unit, pairs = ("patches", "patch_pairs")
        if i >= num_with_past:
            unit, pairs = ("current_patches", "current_pairs")
        layer = f"{tower}.encoder.layers.{i}"
        normed = operations.norm(f"{layer}.layer_norm1", rows)
        q, k, v = (
            operations.linear(unit, f"{layer}.self_attn.{name}_proj", width, width, normed)
            for name in "qkv"
        )
        if (i + 1) % stride == 0:
            v |= operations.attention("time_pairs", width, q, k, v)
        seen = operations.attention(pairs, width, q, k, v)
        rows |= operations.linear(unit, f"{layer}.self_attn.out_proj", width, width, seen)
        hidden = operations.norm(f"{layer}.layer_norm2", rows)
        hidden = operations.linear(unit, f"{layer}.mlp.fc1", width, inner, hidden)
        rows |= operations.linear(unit, f"{layer}.mlp.fc2", inner, width, hidden)
    rows = operations.norm(f"{tower}.post_layernorm", rows)
    projector = f"{_BACKBONE}.multi_modal_projector"
    rows = operations.norm(f"{projector}.mm_soft_emb_norm", rows)
    size = width * backbone.text_config.hidden_size
    return operations.matrix("image_tokens", f"{projector}.mm_input_projection_weight", size, rows)


def _backbone_layer(
    operations: Operations,
    rest: Operations,
    output: tuple[str, str],
    text: Gemma3TextConfig,
    number: int,
    rows: bool,
) -> tuple[bool, bool, bool]:
    """Count a layer; returns whether gradients reach its output rows, keys, and values.

    Args:
        rest: counts everything but keys and values.
        output: the units of its output rows and of the pairs that they see.
        rows: whether gradients reach the input rows.
    """
    tokens, pairs = output
    layer = f"{_ENGINE}.interleaved_layers.{number}.backbone_layer"
    width, queries = text.hidden_size, text.num_attention_heads * text.head_dim
    keys, attention = text.num_key_value_heads * text.head_dim, f"{layer}.self_attn"
    normed = operations.norm(f"{layer}.input_layernorm", rows)
    q = rest.linear("tokens", f"{attention}.q_proj", width, queries, normed)
    k = operations.linear("tokens", f"{attention}.k_proj", width, keys, normed)
    v = operations.linear("tokens", f"{attention}.v_proj", width, keys, normed)
    q, k = rest.norm(f"{attention}.q_norm", q), operations.norm(f"{attention}.k_norm", k)
    seen = rest.attention(pairs, queries, q, k, v)
    out = rest.linear(tokens, f"{attention}.o_proj", queries, width, seen)
    rows |= rest.norm(f"{layer}.post_attention_layernorm", out)
    hidden = rest.norm(f"{layer}.pre_feedforward_layernorm", rows)
    hidden = _mlp(rest, tokens, f"{layer}.mlp", width, text.intermediate_size, hidden)
    rows |= rest.norm(f"{layer}.post_feedforward_layernorm", hidden)
    return rows, k, v


def _expert_layer(
    operations: Operations,
    expert: GemmaExpertConfig,
    number: int,
    rows: bool,
    time: bool,
    seen: tuple[bool, bool],
) -> bool:
    """Count a layer; returns whether gradients reach its output rows.

    Args:
        rows, time: whether gradients reach the input rows, and the condition.
        seen: whether gradients reach the prefix's keys, and its values.
    """
    layer = f"{_ENGINE}.interleaved_layers.{number}.expert_layer"
    width, queries = expert.hidden_size, expert.num_attention_heads * expert.head_dim
    keys, attention = expert.num_key_value_heads * expert.head_dim, f"{layer}.self_attn"
    condition = _condition(operations, f"{layer}.input_layernorm", expert, time)
    normed = rows or condition
    q = operations.linear("steps", f"{attention}.q_proj", width, queries, normed)
    k = operations.linear("steps", f"{attention}.k_proj", width, keys, normed)
    v = operations.linear("steps", f"{attention}.v_proj", width, keys, normed)
    out = operations.attention("step_pairs", queries, q, k, v)
    out |= operations.attention("cross_pairs", queries, q, *seen)
    # The condition also gives a gate, which gets a gradient only if the gated rows do.
    rows |= operations.linear("steps", f"{attention}.o_proj", queries, width, out)
    condition = _condition(operations, f"{layer}.post_attention_layernorm", expert, time)
    inner = expert.intermediate_size
    return _mlp(operations, "steps", f"{layer}.mlp", width, inner, rows or condition)


def _condition(operations: Operations, module: str, expert: GemmaExpertConfig, time: bool) -> bool:
    """The linear of an adaptive norm."""
    return operations.linear(
        "steps", f"{module}.dense", expert.adarms_cond_dim, 3 * expert.hidden_size, time
    )


def _mlp(
    operations: Operations, unit: str, module: str, width: int, inner: int, rows: bool
) -> bool:
    gate = operations.linear(unit, f"{module}.gate_proj", width, inner, rows)
    up = operations.linear(unit, f"{module}.up_proj", width, inner, rows)
    return operations.linear(unit, f"{module}.down_proj", inner, width, gate or up)


def _num_true(masks: Sequence[np.ndarray]) -> np.ndarray:
    """Number of several `[B]` masks that are True, `[B]` int64."""
    return np.sum(np.asarray(masks, dtype=np.int64), axis=0)
