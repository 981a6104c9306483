"""Operations of pi07's models for a batch, by what they do for real frames, tokens and steps.

The tower: patch embedding and layers for every patch of every real frame and goal image, attention
within a frame, and in the layers that look back that of each patch with itself in the real frames
up to its own; past frames go through all layers, as the model has it, though only current ones come
out. The backbone: linears for every real token of the prefix, attention of the pairs that its
blocks let see each other, a head at the real tokens that it predicts. The expert: all steps of a
chunk, which see each other and the real tokens before the action tail.

Real are the frames and states that the history has, the current one always, of the cameras that
there are, and the tokens that masks say; labels are, where they are laid out. See
`paddle_vl.families.flops` for what is counted at all.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from paddle_vl.families.flops import FlopCounter, Operations
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.engine_config import Gemma3Config, Gemma3TextConfig, GemmaExpertConfig
from paddle_vl.families.pi07.planner_config import PI07PlannerConfig
from paddle_vl.families.pi07.prefix_counts import PrefixCounts, how_many, real_steps
from paddle_vl.families.pi07.prefix_layout import PLANNER_BLOCKS, PREFIX_BLOCKS

_ENGINE = "model.gemma3_with_expert"
_BACKBONE = f"{_ENGINE}.gemma3.model"
_LANGUAGE = f"{_BACKBONE}.language_model"
_TOKEN_TABLE = f"{_LANGUAGE}.embed_tokens.weight"


class PI07Flops(FlopCounter):
    """Counts the operations of the low-level policy's batches, see `FlopCounter`.

    Args:
        label_ids: token ids of the labels of the prefix, see `PI07LowLevelFlowMatching`.
        trained: checkpoint names of the parameters that are trained; None for all.
        losses: those of `MSE` and `CE` that are a part of the graph.
    """

    def __init__(
        self,
        config: PI07Config,
        label_ids: Mapping[str, Sequence[int]],
        trained: Collection[str] | None = None,
        losses: Collection[str] = ("MSE", "CE"),
    ):
        self.config, self._labels = config, {text: len(ids) for text, ids in label_ids.items()}
        self._operations = self._walk(Operations(trained), losses)

    def units(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Those of the tower; `tokens` of the prefix and `token_pairs`; `states`, `action_tokens`;
        `steps` of chunks, `step_pairs`, and `cross_pairs` of steps and prefix tokens."""
        backbone = self.config.vlm_config.gemma3_config
        real_BT = real_steps(batch)
        real_B = real_BT.sum(axis=1)
        cameras_B = how_many(batch["vid_masks"])
        goals_B = how_many(batch.get("subgoal_img_masks") or [np.zeros_like(real_B)])
        frame_pairs = 0
        if real_BT.shape[1] > 1:
            frame_pairs = int((cameras_B * (real_B * (real_B + 1) // 2)).sum())
        prefix = PrefixCounts(PREFIX_BLOCKS, batch, backbone.mm_tokens_per_image, self._labels)
        samples, steps = batch["actions"].shape[:2]
        frames = int((cameras_B * real_B + goals_B).sum())
        return _tower_units(backbone, frames, frame_pairs, int((cameras_B + goals_B).sum())) | {
            "tokens": prefix.num_tokens,
            "token_pairs": prefix.num_pairs,
            "states": int(real_B.sum()),
            "action_tokens": int(batch["discrete_action_masks"].sum()),
            "steps": samples * steps,
            "step_pairs": samples * steps**2,
            "cross_pairs": steps * prefix.num_seen,
        }

    def operations(self, batch: Mapping[str, Any]) -> Operations:
        return self._operations

    def _walk(self, operations: Operations, losses: Collection[str]) -> Operations:
        config, vlm = self.config, self.config.vlm_config
        text = vlm.gemma3_config.text_config
        width, insulated = text.hidden_size, config.knowledge_insulation
        quiet = operations.without_backward()
        # What the tokens' loss trains, the flow's does too unless it is kept out.
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
            rows, key, value = _backbone_layer(prefix, tokens if is_last else prefix, text, i, rows)
            seen = (key and not insulated, value and not insulated)
            steps = _expert_layer(actions, vlm.gemma_expert_config, i, steps, time, seen)
        rows = tokens.norm(f"{_LANGUAGE}.norm", rows)
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


class PI07PlannerFlops(FlopCounter):
    """The same for the planner, whose losses are `CE_memory` and `CE_response`."""

    def __init__(
        self,
        config: PI07PlannerConfig,
        label_ids: Mapping[str, Sequence[int]],
        trained: Collection[str] | None = None,
        losses: Collection[str] = ("CE_memory", "CE_response"),
    ):
        self.config, self._labels = config, {text: len(ids) for text, ids in label_ids.items()}
        self._operations = self._walk(Operations(trained), losses)

    def units(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Those of the tower; `tokens` of the prefix and `token_pairs`; `memory_tokens` and
        `response_tokens` that are predicted: each segment's but the first."""
        backbone = self.config.vlm_config.gemma3_config
        images = int(how_many(batch["img_masks"]).sum())
        prefix = PrefixCounts(PLANNER_BLOCKS, batch, backbone.mm_tokens_per_image, self._labels)
        return _tower_units(backbone, images, 0, images) | {
            "tokens": prefix.num_tokens,
            "token_pairs": prefix.num_pairs,
            "memory_tokens": int(batch["memory_masks"][:, 1:].sum()),
            "response_tokens": int(batch["response_masks"][:, 1:].sum()),
        }

    def operations(self, batch: Mapping[str, Any]) -> Operations:
        return self._operations

    def _walk(self, operations: Operations, losses: Collection[str]) -> Operations:
        backbone = self.config.vlm_config.gemma3_config
        text, layers = backbone.text_config, backbone.vision_config.num_hidden_layers
        rows = _tower(operations, backbone, layers + 1)
        rows |= operations.trains(_TOKEN_TABLE)
        for i in range(text.num_hidden_layers):
            rows, _, _ = _backbone_layer(operations, operations, text, i, rows)
        rows = operations.norm(f"{_LANGUAGE}.norm", rows)
        for name in ("memory", "response"):
            counted = operations if f"CE_{name}" in losses else operations.without_backward()
            size = text.hidden_size * text.vocab_size
            counted.matrix(f"{name}_tokens", _TOKEN_TABLE, size, rows)
        return operations


def _tower_units(
    backbone: Gemma3Config, frames: int, frame_pairs: int, images: int
) -> dict[str, int]:
    """`patches`; `patch_pairs` and `time_pairs`, that see each other; `image_tokens`.

    Args:
        frames: that the tower sees; frame_pairs: of a video, that see each other.
        images: that come out.
    """
    patches = backbone.vision_config.num_patches
    return {
        "patches": frames * patches,
        "patch_pairs": frames * patches**2,
        "time_pairs": frame_pairs * patches,
        "image_tokens": images * backbone.mm_tokens_per_image,
    }


def _tower(operations: Operations, backbone: Gemma3Config, stride: int) -> bool:
    """The tower and the projector."""
    vision, tower = backbone.vision_config, f"{_BACKBONE}.vision_tower.vision_model"
    width, inner, embeddings = vision.hidden_size, vision.intermediate_size, f"{tower}.embeddings"
    rows = operations.linear(
        "patches", f"{embeddings}.patch_embedding", 3 * vision.patch_size**2, width, False
    )
    rows |= operations.trains(f"{embeddings}.position_embedding.weight")
    for i in range(vision.num_hidden_layers):
        layer = f"{tower}.encoder.layers.{i}"
        normed = operations.norm(f"{layer}.layer_norm1", rows)
        q, k, v = (
            operations.linear("patches", f"{layer}.self_attn.{name}_proj", width, width, normed)
            for name in "qkv"
        )
        if (i + 1) % stride == 0:
            v |= operations.attention("time_pairs", width, q, k, v)
        seen = operations.attention("patch_pairs", width, q, k, v)
        rows |= operations.linear("patches", f"{layer}.self_attn.out_proj", width, width, seen)
        hidden = operations.norm(f"{layer}.layer_norm2", rows)
        hidden = operations.linear("patches", f"{layer}.mlp.fc1", width, inner, hidden)
        rows |= operations.linear("patches", f"{layer}.mlp.fc2", inner, width, hidden)
    rows = operations.norm(f"{tower}.post_layernorm", rows)
    projector = f"{_BACKBONE}.multi_modal_projector"
    rows = operations.norm(f"{projector}.mm_soft_emb_norm", rows)
    size = width * backbone.text_config.hidden_size
    return operations.matrix("image_tokens", f"{projector}.mm_input_projection_weight", size, rows)


def _backbone_layer(
    operations: Operations, rest: Operations, text: Gemma3TextConfig, number: int, rows: bool
) -> tuple[bool, bool, bool]:
    """Whether gradients pass the rows that come out, and the keys and values of the layer.

    Args:
        rest: where all but keys and values is counted.
    """
    layer = f"{_ENGINE}.interleaved_layers.{number}.backbone_layer"
    width, queries = text.hidden_size, text.num_attention_heads * text.head_dim
    keys, attention = text.num_key_value_heads * text.head_dim, f"{layer}.self_attn"
    normed = operations.norm(f"{layer}.input_layernorm", rows)
    q = rest.linear("tokens", f"{attention}.q_proj", width, queries, normed)
    k = operations.linear("tokens", f"{attention}.k_proj", width, keys, normed)
    v = operations.linear("tokens", f"{attention}.v_proj", width, keys, normed)
    q, k = rest.norm(f"{attention}.q_norm", q), operations.norm(f"{attention}.k_norm", k)
    seen = rest.attention("token_pairs", queries, q, k, v)
    out = rest.linear("tokens", f"{attention}.o_proj", queries, width, seen)
    rows |= rest.norm(f"{layer}.post_attention_layernorm", out)
    hidden = rest.norm(f"{layer}.pre_feedforward_layernorm", rows)
    hidden = _mlp(rest, "tokens", f"{layer}.mlp", width, text.intermediate_size, hidden)
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
    """
    Args:
        time: whether a gradient passes the condition; seen: keys and values of the prefix.
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
    # The condition is a gate too, which carries nothing that the gated rows do not.
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
