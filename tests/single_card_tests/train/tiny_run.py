"""A complete tiny run on disk: single-colour images, questions, processor, settings."""

import json
from pathlib import Path

import yaml

from paddle_vl.testing.tiny_run import write_pictures, write_processor

MODEL = {
    "text_config": {
        "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        "rope_theta": 5000000.0, "initializer_range": 0.1,
    },
    "vision_config": {
        "depth": 2, "hidden_size": 8, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        "initializer_range": 0.1,
    },
    "tie_word_embeddings": True,
}  # fmt: skip

# Sizes that two ranks divide, and an epsilon as `paddle_vl.testing.tiny_qwen3_5_config` has it.
MODEL_3_5 = {
    "model_type": "qwen3_5",
    "text_config": {
        "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "full", "linear")],
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 4, "linear_value_head_dim": 6, "rms_norm_eps": 1e-2,
        "rope_parameters": {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        "rope_theta": 10000000.0, "initializer_range": 0.1,
    },
    "vision_config": MODEL["vision_config"] | {"deepstack_visual_indexes": []},
    "tie_word_embeddings": True,
}  # fmt: skip

MODEL_OCR = {
    "model_type": "paddleocr_vl", "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 1024, "initializer_range": 0.1,
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 18, "patch_size": 4, "spatial_merge_size": 2,
        "initializer_range": 0.1,
    },
}  # fmt: skip


def write_tiny_run(folder: Path, num_samples: int = 12, model: dict = MODEL) -> Path:
    """Write images, train.jsonl, test.jsonl, processor/ and run.yaml; return the path of
    run.yaml."""
    records = []
    for number, (name, file) in enumerate(write_pictures(folder, num_samples)):
        question = "<image>Which colour?" + " Please." * (number % 4)
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": name},
        ]
        if number % 4 == 1:
            messages += [
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "yes"},
            ]
        task = "chat" if len(messages) > 2 else "colour"
        records.append({"messages": messages, "images": [file], "task": task})
    write_records(folder / "train.jsonl", records)
    write_records(folder / "test.jsonl", records[:5])
    frames = 1 if model.get("model_type") == "paddleocr_vl" else 2
    write_processor(folder / "processor", "Which colour? red green blue yes", frames)
    settings = {
        "model": {"config": model},
        "data": {
            "train": [str(folder / "train.jsonl")],
            "processor": str(folder / "processor"),
            "max_length": 128,
        },
        "train": {
            "output_dir": str(folder / "out"),
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.01,
            "warmup_steps": 1,
            "seed": 5,
        },
        "logging": {"logging_steps": 1, "progress_bar": False},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def write_records(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
