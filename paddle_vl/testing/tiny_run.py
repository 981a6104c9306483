"""A complete tiny training run of Qwen3-VL on disk: pictures, questions, processor, settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from paddle_vl.families.vlm.inputs.image_processor import ImageProcessor
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.tokenizer import train_bpe
from paddle_vl.families.vlm.templates.built_in import CONTROL_TOKENS

VOCABULARY = 280
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}
_SAMPLES, _SIDE = 16, 12
# Sizes that tensor and pipeline parallelism of 2, 4 and 8 ranks divide.
_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8,
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    "rope_theta": 5000000.0, "initializer_range": 0.1,
}  # fmt: skip
_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    "initializer_range": 0.1,
}  # fmt: skip
# Settings of the text that give it experts.
TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def write_tiny_run(folder: Path, steps: int = 2, text: Mapping[str, Any] = {}) -> Path:
    """Write all files of a run; samples differ in length and in their number of pictures.

    Adam divides a gradient by its size; a large epsilon keeps rounding of entries near zero from
    becoming full updates, so that runs of different topologies can be compared.

    Args:
        text: settings of the text model to change, such as `TINY_EXPERTS`.

    Returns:
        The settings, `run.yaml`; its output folder is `out`, its steps have 8 samples.
    """
    lines = []
    for number, (name, file) in enumerate(write_pictures(folder, _SAMPLES)):
        # One picture, none, or two.
        pictures = [[file], [], [file, file]][number % 3]
        question = "<image>" * len(pictures) + "Which colour?" + " Please." * (number % 4)
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": name},
        ]
        lines.append(json.dumps({"messages": messages, "images": pictures}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_processor(folder / "processor", "Which colour? Please. red green blue")
    settings = {
        "model": {
            "config": {
                "model_type": "qwen3_vl_moe" if "num_experts" in text else "qwen3_vl",
                "text_config": _TEXT | dict(text),
                "vision_config": _VISION,
                "tie_word_embeddings": True,
            }
        },
        "data": {
            "train": [str(folder / "train.jsonl")],
            "processor": str(folder / "processor"),
            "max_length": 128,
            "num_workers": 0,
        },
        "train": {
            "output_dir": str(folder / "out"),
            "max_steps": steps,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.01,
            "warmup_steps": 0,
            "adam_epsilon": 1e-2,
            "seed": 5,
        },
        "logging": {"logging_steps": 1, "progress_bar": False},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def write_pictures(folder: Path, count: int) -> list[tuple[str, str]]:
    """Write single-colour images into `folder`/images; returns their colours and relative paths."""
    (folder / "images").mkdir(parents=True)
    rng, written = np.random.default_rng(0), []
    for number in range(count):
        name = list(COLOURS)[number % 3]
        pixels = np.array(COLOURS[name]) + rng.integers(-20, 20, (_SIDE, _SIDE, 3))
        file = f"images/{number}.png"
        Image.fromarray(pixels.astype(np.uint8)).save(folder / file)
        written.append((name, file))
    return written


def write_processor(folder: Path, text: str, frames: int = 2) -> None:
    """Write a processor with a tokenizer for the words of a text, and patches of 4 pixels and so
    many frames."""
    images = ImageProcessor(
        min_pixels=64, max_pixels=256, patch_size=4, temporal_patch_size=frames, merge_size=2,
        image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5),
    )  # fmt: skip
    tokenizer = train_bpe([text], VOCABULARY, CONTROL_TOKENS)
    VLProcessor(tokenizer, images).save_pretrained(folder)
