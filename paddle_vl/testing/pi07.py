"""A tiny pi07 policy, its model, and batches for it."""

from typing import Any

import numpy as np
import paddle

from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.nn.placement import Placement
from paddle_vl.testing.tensors import copy_parameters

CAMERAS, FRAMES, SIDE, CHUNK, ACTIONS, STATES, SLOTS = 2, 3, 56, 6, 7, 5, 5
LENGTHS = {"lang": 9, "response": 6, "metadata": 7}
# Token ids of the labels between the blocks of the prefix.
LABELS = {
    "State: ": [101, 57, 58], ", ": [59, 58], ":\n": [57, 60], ";\n ": [61, 60, 58],
    "Subgoal: ": [102, 103, 57, 58], "Action: ": [104, 57, 58], "Subtask: ": [105, 106, 57, 58],
    "Updated Memory: ": [107, 108, 57, 58],
}  # fmt: skip


def _engine(**changes: Any) -> dict[str, Any]:
    text = {
        "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
        "query_pre_attn_scalar": 24, "sliding_window": 4, "vocab_size": 256,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "max_position_embeddings": 512,
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 4, "num_hidden_layers": 3, "patch_size": 14, "image_size": SIDE,
        "projection_dim": 64, "projector_hidden_act": "gelu_fast", "vision_use_head": False,
    }  # fmt: skip
    expert = {
        "model_type": "gemma", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "use_adarms": True,
        "adarms_cond_dim": 32, "vocab_size": 8, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 512,
    }  # fmt: skip
    return {
        "gemma3_config": {
            "model_type": "gemma3", "text_config": text, "vision_config": vision,
            "image_token_index": 255, "mm_tokens_per_image": 4, "boi_token_index": 253,
            "eoi_token_index": 254,
        },
        "gemma_expert_config": expert, "freeze_vision_encoder": False, "dropout": 0.0,
        "disable_internal_bf16_cast": True, "discrete_action_vocab_size": 40,
    } | changes  # fmt: skip


def tiny_pi07_config(**changes: Any) -> PI07Config:
    """A policy of three layers with two cameras, chunks of 6 steps, and history of 3 frames.

    8 query heads share 2 key heads, so that mp_degree 1, 2, 4 and 8 run. Nothing is frozen.

    Args:
        changes: settings as in config.json, such as `knowledge_insulation`.
    """
    values = {
        "vlm_config": _engine(), "n_obs_steps": FRAMES, "chunk_size": CHUNK,
        "n_action_steps": CHUNK, "max_state_dim": STATES, "max_action_dim": ACTIONS,
        "proj_width": 32, "num_steps": 5, "prompt_max_length": LENGTHS["lang"],
        "response_max_length": LENGTHS["response"], "metadata_max_length": LENGTHS["metadata"],
        "discrete_action_max_length": SLOTS, "spacetime_layer_stride": 2, "dropout": 0.0,
        "resize_imgs_with_padding": (SIDE, SIDE),
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ACTION": "MEAN_STD"},
        "input_features": {
            **{
                f"camera{i}": {"type": "VISUAL", "shape": [3, SIDE, SIDE]} for i in range(CAMERAS)
            },
            "state": {"type": "STATE", "shape": [STATES]},
        },
        "output_features": {"actions": {"type": "ACTION", "shape": [ACTIONS]}},
    }  # fmt: skip
    return PI07Config.from_dict(values | changes)


def tiny_pi07(
    placement: Placement | None = None, seed: int = 0, **changes: Any
) -> PI07LowLevelFlowMatching:
    """The model of a tiny policy; equal seeds give equal full parameters under every placement.

    Called with a batch it returns the losses `MSE` and `CE`.

    Args:
        changes: see `tiny_pi07_config`.
    """
    config = tiny_pi07_config(**changes)
    paddle.seed(seed)
    model = PI07LowLevelFlowMatching(config, LABELS)
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        noise = rng.normal(scale=0.05, size=parameter.shape).astype(np.float32)
        parameter.set_value(parameter.numpy() + noise)
    if placement is None:
        return model
    placed = PI07LowLevelFlowMatching(config, LABELS, placement)
    copy_parameters(model, placed)
    return placed


def tiny_pi07_batch(size: int = 3, seed: int = 0) -> dict[str, Any]:
    """A batch for the model with noise and times; every other sample has the optional inputs.

    Args:
        size: samples. With 3 the number of rows is no multiple of the mp degrees, as in practice.

    Returns:
        The fields of a prepared training batch: pictures `[B, 3, H, W]` in [-1, 1] (videos with
        frames, in [0, 1]), float32; token ids int64 with bool masks; normalized state and actions.
    """
    rng = np.random.default_rng(seed)
    is_given = np.arange(size) % 2 == 0

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(size, *shape)).astype(np.float32)

    def pictures(*frames: int) -> list[np.ndarray]:
        shape = (size, *frames, 3, SIDE, SIDE)
        return [rng.random(shape, dtype=np.float32) for _ in range(CAMERAS)]

    batch: dict[str, Any] = {}
    for name, length in LENGTHS.items():
        batch[f"{name}_tokens"] = rng.integers(0, 250, (size, length))
        masks = rng.random((size, length)) < 0.8
        batch[f"{name}_masks"] = masks if name == "lang" else masks & is_given[:, None]
    return batch | {
        "videos": pictures(FRAMES),
        "vid_masks": [np.ones(size, bool) for _ in range(CAMERAS)],
        "subgoal_images": [image * 2 - 1 for image in pictures()],
        "subgoal_img_masks": [is_given for _ in range(CAMERAS)],
        "obs_history_is_pad": np.tile([True] + [False] * (FRAMES - 1), (size, 1)),
        "state": normal(FRAMES, STATES),
        "actions": normal(CHUNK, ACTIONS),
        "noise": normal(CHUNK, ACTIONS),
        "time": rng.uniform(0.1, 0.9, size).astype(np.float32),
        "delay": np.zeros(size, np.int64),
        "discrete_actions": rng.integers(0, 40, (size, SLOTS)),
        "discrete_action_masks": rng.random((size, SLOTS)) < 0.8,
    }
