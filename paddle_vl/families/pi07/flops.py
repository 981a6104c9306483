"""FLOPs of pi07's models for a batch, counted for real frames, tokens and steps only; and the costs
of layers, for a batch with all fields.

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

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from paddle_vl.families.base import LayerCosts
from paddle_vl.families.flops import FlopCounter, Operations
from paddle_vl.families.pi07.config import (
    Gemma3Config,
    Gemma3TextConfig,
    GemmaExpertConfig,
    PI07Config,
    PI07PlannerConfig,
)
from paddle_vl.families.pi07.prefix import (
    PLANNER_BLOCKS,
    PREFIX_BLOCKS,
    PrefixTokens,
    presence_of,
    real_frames,
)

_ENGINE = "model.gemma3_with_expert"
_BACKBONE = f"{_ENGINE}.gemma3.model"
_LANGUAGE = f"{_BACKBONE}.language_model"
_TOKEN_TABLE = f"{_LANGUAGE}.embed_tokens.weight"
# Units of rows, and of the pairs that they see.
_PATCHES, _CURRENT = ("patches", "patch_pairs"), ("current_patches", "current_pairs")
_ALL_TOKENS, _PREDICTING = ("tokens", "token_pairs"), ("predicting_tokens", "predicting_pairs")
# Relative cost of a frozen tower: forward only, while a backward pass costs two forward passes.
FROZEN_SHARE = 1 / 3


class PI07Flops(FlopCounter):
    """Counts the operations of batches of the low-level policy or the planner, see `FlopCounter`.

    Args:
        label_ids: token ids of the prefix's labels, see the model.
        trained: checkpoint names of the trained parameters; None for all.
        losses: the computed ones, `MSE` and `CE` of the policy, `CE_memory` and `CE_response` of
            the planner; None for all.
        ranks: LoRA ranks by adapted module.
    """

    def __init__(
        self,
        config: PI07Config | PI07PlannerConfig,
        label_ids: Mapping[str, Sequence[int]],
        trained: Collection[str] | None = None,
        losses: Collection[str] | None = None,
        ranks: Mapping[str, int] = {},
    ):
        self.config, self._operations = config, Operations(trained, ranks)
        blocks = PREFIX_BLOCKS if isinstance(config, PI07Config) else PLANNER_BLOCKS
        camera_tokens = config.vlm_config.gemma3_config.mm_tokens_per_image
        self._tokens = PrefixTokens(blocks, label_ids, camera_tokens)
        if isinstance(config, PI07Config):
            _count_policy(self._operations, config, ("MSE", "CE") if losses is None else losses)
        else:
            _count_planner(self._operations, config, losses)

    def operations(self, batch: Mapping[str, Any]) -> Operations:
        return self._operations

    def units(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Units `patches`, `image_tokens`, and visible pairs of patches: `patch_pairs` in a frame,
        `time_pairs` in time; `current_patches` and `current_pairs` of output images alone; `tokens`
        of the prefix and `token_pairs`.

        Of the policy also `predicting_tokens`, those before action tokens, and `predicting_pairs`;
        `states`, `action_tokens`; `steps` of chunks, `step_pairs`, and `cross_pairs` of steps and
        prefix tokens. Of the planner `memory_tokens` and `response_tokens`, the predicted ones: all
        but each segment's first.
        """
        backbone, acts = self.config.vlm_config.gemma3_config, isinstance(self.config, PI07Config)
        patches, samples = backbone.vision_config.num_patches, len(batch["lang_tokens"])
        real_BF = real_frames(batch, np) if acts else np.ones([samples, 1], dtype=bool)
        real_B = real_BF.sum(axis=1)
        cameras_B = _num_true(batch["vid_masks" if acts else "img_masks"])
        goals_B = _num_true(batch.get("subgoal_img_masks") or [np.zeros_like(real_B)])
        frame_pairs = 0
        if real_BF.shape[1] > 1:
            frame_pairs = int((cameras_B * (real_B * (real_B + 1) // 2)).sum())
        frames = int((cameras_B * real_B + goals_B).sum())
        images = int((cameras_B + goals_B).sum())
        presence = presence_of(batch)
        pad_BL, marks_BL, num_seen, _ = self._tokens.masks(batch, presence, xp=np)
        seen_BL = _num_visible(pad_BL, marks_BL)
        units = {
            "patches": frames * patches,
            "patch_pairs": frames * patches**2,
            "time_pairs": frame_pairs * patches,
            "current_patches": images * patches,
            "current_pairs": images * patches**2,
            "image_tokens": images * backbone.mm_tokens_per_image,
            "tokens": int(pad_BL.sum()),
            "token_pairs": int(seen_BL.sum()),
        }
        if not acts:
            masks = {name: batch[f"{name}_masks"] for name in ("memory", "response")}
            return units | {f"{n}_tokens": int(mask[:, 1:].sum()) for n, mask in masks.items()}
        steps, length = batch["actions"].shape[1], pad_BL.shape[1]
        predicting = slice(length - 1 - batch["discrete_actions"].shape[1], length - 1)
        return units | {
            "predicting_tokens": int(pad_BL[:, predicting].sum()),
            "predicting_pairs": int(seen_BL[:, predicting].sum()),
            "states": int(real_B.sum()),
            "action_tokens": int(batch["discrete_action_masks"].sum()),
            "steps": samples * steps,
            "step_pairs": samples * steps**2,
            "cross_pairs": steps * int(pad_BL[:, :num_seen].sum()),
        }


def _num_visible(pad_BL: np.ndarray, marks_BL: np.ndarray) -> np.ndarray:
    """Number of real tokens that each real token sees, `[B, L]`; see `BlockMask`."""
    seen_BL = np.zeros(pad_BL.shape, dtype=np.int64)
    for seen_L, block_L, pad_L in zip(seen_BL, np.cumsum(marks_BL, axis=1), pad_BL, strict=True):
        real = block_L[pad_L]
        seen_L[pad_L] = np.cumsum(np.bincount(real))[real]
    return seen_BL


def _count_policy(operations: Operations, config: PI07Config, losses: Collection[str]) -> None:
    vlm, width, insulated = config.vlm_config, config.proj_width, config.knowledge_insulation
    text, expert = vlm.gemma3_config.text_config, vlm.gemma_expert_config
    quiet = operations.without_backward()
    # Without knowledge insulation the flow loss also trains what the token loss trains.
    prefix = operations if "CE" in losses or not insulated else quiet
    tokens = operations if "CE" in losses else quiet
    actions = operations if "MSE" in losses else quiet
    suffix = actions.at("steps", "model")
    rows = _tower(prefix, vlm.gemma3_config, config.spacetime_layer_stride)
    rows |= prefix.trains(_TOKEN_TABLE, f"{_ENGINE}.discrete_action_embedding.weight")
    states = prefix.at("states", "model")
    rows |= states.linear("state_proj", config.max_state_dim, text.hidden_size, False)
    steps = suffix.linear("action_in_proj", config.max_action_dim, width, False)
    time = suffix.linear("time_mlp_in", width, width, False)
    time = suffix.linear("time_mlp_out", width, width, time)
    last = text.num_hidden_layers - 1
    for i in range(text.num_hidden_layers):
        rest = (tokens, _PREDICTING) if i == last else (prefix, _ALL_TOKENS)
        rows, key, value = _backbone_layer(prefix, *rest, text, i, rows)
        seen = (key and not insulated, value and not insulated)
        steps = _expert_layer(actions, expert, i, steps, time, seen)
    rows = tokens.norm(f"{_LANGUAGE}.norm", rows)
    vocabulary = vlm.discrete_action_vocab_size
    assert vocabulary is not None, "the model's head has a size"
    tokens.at("action_tokens", _ENGINE).linear("da_head", text.hidden_size, vocabulary, rows)
    steps |= _condition(suffix, "gemma3_with_expert.gemma_expert.model.norm", expert, time)
    suffix.linear("action_out_proj", width, config.max_action_dim, steps)


def _count_planner(
    operations: Operations, config: PI07PlannerConfig, losses: Collection[str] | None
) -> None:
    backbone = config.vlm_config.gemma3_config
    text, layers = backbone.text_config, backbone.vision_config.num_hidden_layers
    rows = _tower(operations, backbone, layers + 1)
    rows |= operations.trains(_TOKEN_TABLE)
    for i in range(text.num_hidden_layers):
        rows, _, _ = _backbone_layer(operations, operations, _ALL_TOKENS, text, i, rows)
    rows = operations.norm(f"{_LANGUAGE}.norm", rows)
    for name in ("memory", "response"):
        computed = losses is None or f"CE_{name}" in losses
        head = (operations if computed else operations.without_backward()).at(f"{name}_tokens")
        head.matrix(_TOKEN_TABLE, text.hidden_size * text.vocab_size, rows)


def layer_costs(config: PI07Config | PI07PlannerConfig) -> LayerCosts:
    """Costs for balancing the stages of a pipeline.

    In multiplications for one sample with all optional fields. Attention scores are left out, since
    they cost the same in every layer.
    """
    vlm = config.vlm_config
    backbone, text = vlm.gemma3_config, vlm.gemma3_config.text_config
    cameras = sum(feature.type == "VISUAL" for feature in config.input_features.values())
    tokens = config.prompt_max_length + config.response_max_length + config.metadata_max_length
    found = Operations()
    _backbone_layer(found, found, _ALL_TOKENS, text, 0, False)
    cost = found.forward["tokens"] / 2
    _tower(found, backbone, 1)
    if isinstance(config, PI07PlannerConfig):
        tokens += cameras * backbone.mm_tokens_per_image + config.memory_max_length
        images, cost, projected = cameras, cost * tokens, 0
        # The first token of memory and of response is not predicted.
        written = config.memory_max_length + config.response_max_length - 2
        after = written * text.hidden_size * text.vocab_size
    else:
        tokens += 2 * cameras * backbone.mm_tokens_per_image + config.n_obs_steps
        tokens += config.discrete_action_max_length
        _expert_layer(found, vlm.gemma_expert_config, 0, False, False, (False, False))
        cost = cost * tokens + found.forward["steps"] / 2 * config.chunk_size
        # The frames and the goal of every camera.
        images = cameras * (config.n_obs_steps + 1)
        width, actions = config.proj_width, config.max_action_dim
        projected = config.chunk_size * width * (actions + 2 * width)
        vocabulary = vlm.discrete_action_vocab_size or 0
        after = config.discrete_action_max_length * text.hidden_size * vocabulary
        after += config.chunk_size * width * actions
    before = images * backbone.vision_config.num_patches * found.forward["patches"] / 2
    before = before * (FROZEN_SHARE if vlm.freeze_vision_encoder else 1) + projected
    return [cost] * text.num_hidden_layers, before, float(after)


def _tower(operations: Operations, backbone: Gemma3Config, stride: int) -> bool:
    """Count tower and projector; returns whether gradients reach their output."""
    vision, tower = backbone.vision_config, f"{_BACKBONE}.vision_tower.vision_model"
    width, inner = vision.hidden_size, vision.intermediate_size
    pixels = operations.at("patches", f"{tower}.embeddings")
    rows = pixels.linear("patch_embedding", 3 * vision.patch_size**2, width, False)
    rows |= pixels.trains("position_embedding.weight")
    num_with_past = vision.num_hidden_layers // stride * stride
    for i in range(vision.num_hidden_layers):
        unit, pairs = _PATCHES if i < num_with_past else _CURRENT
        layer = operations.at(unit, f"{tower}.encoder.layers.{i}")
        normed = layer.norm("layer_norm1", rows)
        q, k, v = (layer.linear(f"self_attn.{n}_proj", width, width, normed) for n in "qkv")
        if (i + 1) % stride == 0:
            v |= layer.attention("time_pairs", width, q, k, v)
        seen = layer.attention(pairs, width, q, k, v)
        rows |= layer.linear("self_attn.out_proj", width, width, seen)
        hidden = layer.linear("mlp.fc1", width, inner, layer.norm("layer_norm2", rows))
        rows |= layer.linear("mlp.fc2", inner, width, hidden)
    rows = operations.norm(f"{tower}.post_layernorm", rows)
    projector = operations.at("image_tokens", f"{_BACKBONE}.multi_modal_projector")
    rows = projector.norm("mm_soft_emb_norm", rows)
    size = width * backbone.text_config.hidden_size
    return projector.matrix("mm_input_projection_weight", size, rows)


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
    (unit, pairs), width, (queries, keys) = output, text.hidden_size, _widths(text)
    layer = f"{_ENGINE}.interleaved_layers.{number}.backbone_layer"
    kept, asked = operations.at("tokens", layer), rest.at("tokens", layer)
    out, normed = rest.at(unit, layer), kept.norm("input_layernorm", rows)
    q = asked.linear("self_attn.q_proj", width, queries, normed)
    k, v = (kept.linear(f"self_attn.{n}_proj", width, keys, normed) for n in "kv")
    q, k = asked.norm("self_attn.q_norm", q), kept.norm("self_attn.k_norm", k)
    seen = out.linear("self_attn.o_proj", queries, width, out.attention(pairs, queries, q, k, v))
    rows |= out.norm("post_attention_layernorm", seen)
    hidden = out.norm("pre_feedforward_layernorm", rows)
    hidden = out.mlp("mlp", width, text.intermediate_size, hidden)
    return rows | out.norm("post_feedforward_layernorm", hidden), k, v


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
    width, (queries, keys) = expert.hidden_size, _widths(expert)
    layer = operations.at("steps", f"{_ENGINE}.interleaved_layers.{number}.expert_layer")
    normed = _condition(layer, "input_layernorm", expert, time) or rows
    q = layer.linear("self_attn.q_proj", width, queries, normed)
    k, v = (layer.linear(f"self_attn.{n}_proj", width, keys, normed) for n in "kv")
    out = layer.attention("step_pairs", queries, q, k, v)
    out |= layer.attention("cross_pairs", queries, q, *seen)
    # The condition also gives a gate, which gets a gradient only if the gated rows do.
    rows |= layer.linear("self_attn.o_proj", queries, width, out)
    normed = _condition(layer, "post_attention_layernorm", expert, time) or rows
    return layer.mlp("mlp", width, expert.intermediate_size, normed)


def _widths(config: Gemma3TextConfig | GemmaExpertConfig) -> tuple[int, int]:
    """Of all queries, and of all keys."""
    head_dim = config.head_dim
    return config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim


def _condition(at: Operations, norm: str, expert: GemmaExpertConfig, time: bool) -> bool:
    """The linear of an adaptive norm."""
    return at.linear(f"{norm}.dense", expert.adarms_cond_dim, 3 * expert.hidden_size, time)


def _num_true(masks: Sequence[np.ndarray]) -> np.ndarray:
    """Number of several `[B]` masks that are True, `[B]` int64."""
    return np.sum(np.asarray(masks, dtype=np.int64), axis=0)
