"""A complete tiny policy run on disk: demonstrations, tokenizers, settings."""

from pathlib import Path

import yaml

import make_demonstrations
from paddle_vl.families.policy.demonstrations.sample import DemonstrationShapes
from paddle_vl.families.policy.demonstrations.synthetic import SyntheticDemonstrations
from paddle_vl.families.policy.normalize import (
    demonstration_statistics,
    write_statistics,
)

SHAPES = {
    "image_size": (28, 28),
    "state_dim": 3,
    "action_dim": 4,
    "n_obs_steps": 2,
    "chunk_size": 4,
}
MODEL = {
    "type": "pi07_low_level",
    "n_obs_steps": 2, "chunk_size": 4, "n_action_steps": 4,
    "max_state_dim": 5, "max_action_dim": 6,
    "resize_imgs_with_padding": [28, 28],
    "prompt_max_length": 16, "response_max_length": 12, "metadata_max_length": 40,
    "discrete_action_max_length": 7,
    "proj_width": 16, "dropout": 0.0, "max_delay": 1,
    "freeze_vision_encoder": False, "spacetime_layer_stride": 2,
    "input_features": {
        "camera0": {"type": "VISUAL", "shape": [3, 28, 28]},
        "camera1": {"type": "VISUAL", "shape": [3, 28, 28]},
        "state": {"type": "STATE", "shape": [3]},
    },
    "output_features": {"actions": {"type": "ACTION", "shape": [4]}},
    "vlm_config": {
        "gemma3_config": {
            "mm_tokens_per_image": 1,
            "text_config": {
                "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
                "query_pre_attn_scalar": 8, "vocab_size": 320,
            },
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                "num_attention_heads": 2, "patch_size": 14, "image_size": 28,
            },
        },
        "gemma_expert_config": {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
            "adarms_cond_dim": 16, "vocab_size": 320,
        },
    },
}  # fmt: skip

_SHARED = ("resize_imgs_with_padding", "input_features", "freeze_vision_encoder", "dropout")
PLANNER = {name: MODEL[name] for name in _SHARED} | {
    "type": "pi07_high_level",
    "prompt_max_length": 64,
    "memory_max_length": 16,
    "response_max_length": 24,
    "metadata_max_length": 40,
    "vlm_config": {
        "disable_action_expert": True,
        "gemma3_config": MODEL["vlm_config"]["gemma3_config"],
    },
}


def write_tiny_policy_run(folder: Path, num_samples: int = 24, **model: object) -> Path:
    """Write demonstrations, processor/, statistics.json and run.yaml; return the path of
    run.yaml."""
    shapes = DemonstrationShapes(cameras=("camera0", "camera1"), **SHAPES)
    source = SyntheticDemonstrations(num_samples, shapes, group_names=["arm::joint"])
    make_demonstrations.write_demonstrations(source, folder)
    write_statistics(folder / "statistics.json", demonstration_statistics(source))
    make_demonstrations.write_processor(source, folder / "processor", 320, 256)
    settings = {
        "model": {"config": MODEL | model},
        "data": {
            "train": [str(folder / "arm-joint.jsonl")],
            "processor": str(folder / "processor"),
            "drops": {"subgoal_drop_prob": 0.6},
        },
        "train": {
            "output_dir": str(folder / "out"),
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.003,
            "warmup_steps": 1,
            "seed": 5,
        },
        "logging": {"logging_steps": 1, "progress_bar": False},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path
