"""A tiny training run for fault injection: images, questions, processor and settings."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from paddle_vl.families.qwen3_vl.inputs.image_processor import ImageProcessor
from paddle_vl.families.qwen3_vl.inputs.processor import Qwen3VLProcessor
from paddle_vl.families.qwen3_vl.inputs.tokenizer import CONTROL_TOKENS, train_bpe

NUM_STEPS = 12
SAVE_STEPS = 2
_NUM_SAMPLES = 12
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}
_MODEL = {
    "text_config": {
        "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        "initializer_range": 0.1,
    },
    "vision_config": {
        "depth": 1, "hidden_size": 8, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        "initializer_range": 0.1,
    },
    "tie_word_embeddings": True,
}  # fmt: skip


def write_tiny_run(folder: Path, extra_lines: Sequence[bytes] = ()) -> Path:
    """Write all files of a run into `folder`; a step takes about 0.1 s.

    Args:
        extra_lines: lines inserted into train.jsonl after the third; bad ones are skipped.

    Returns:
        The settings, `run.yaml`.
    """
    lines = []
    for number, (name, file) in enumerate(write_pictures(folder, _NUM_SAMPLES)):
        question = "<image>Which colour?" + " Please." * (number % 4)
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": name},
        ]
        lines.append(json.dumps({"messages": messages, "images": [file]}).encode())
    (folder / "test.jsonl").write_bytes(b"\n".join(lines[:5]) + b"\n")
    (folder / "train.jsonl").write_bytes(b"\n".join([*lines[:3], *extra_lines, *lines[3:]]) + b"\n")
    write_processor(folder / "processor", "Which colour? red green blue")
    settings = {
        "model": {"config": _MODEL},
        "data": {
            "train": [str(folder / "train.jsonl")],
            "eval": [str(folder / "test.jsonl")],
            "processor": str(folder / "processor"),
            "max_length": 128,
            "on_bad_sample": "skip" if extra_lines else "fail",
        },
        "train": {
            "output_dir": str(folder / "out"),
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.01,
            "warmup_steps": 1,
            "seed": 5,
            "eval_steps": 3,
            "save_steps": SAVE_STEPS,
        },
        "logging": {"logging_steps": 1, "progress_bar": False},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def write_pictures(folder: Path, count: int) -> list[tuple[str, str]]:
    """Write single-colour images into `folder`/images; return their colours and relative paths."""
    (folder / "images").mkdir(parents=True)
    rng = np.random.default_rng(0)
    written = []
    for number in range(count):
        name = list(COLOURS)[number % 3]
        pixels = np.array(COLOURS[name]) + rng.integers(-20, 20, (12, 12, 3))
        file = f"images/{number}.png"
        Image.fromarray(pixels.astype(np.uint8)).save(folder / file)
        written.append((name, file))
    return written


def write_processor(folder: Path, text: str) -> None:
    """Write a processor for tiny images with a tokenizer for the words of the text."""
    images = ImageProcessor(
        min_pixels=64, max_pixels=256, patch_size=4, temporal_patch_size=2, merge_size=2,
        image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5),
    )  # fmt: skip
    Qwen3VLProcessor(train_bpe([text], 280, CONTROL_TOKENS), images).save_pretrained(folder)
