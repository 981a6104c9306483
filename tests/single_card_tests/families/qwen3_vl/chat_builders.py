"""Small processors, image files and JSONL files for tests of data."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from paddle_vl.families.vlm.inputs.image_processor import ImageProcessor
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer, train_bpe
from paddle_vl.families.vlm.inputs.video_processor import VideoProcessor
from paddle_vl.families.vlm.templates.built_in import CONTROL_TOKENS

TEXTS = ["user\n", "assistant\n", "system\n", "What is this?", "A cat on a mat.", "hello hello"]


def tiny_tokenizer() -> TextTokenizer:
    return train_bpe(TEXTS, 300, CONTROL_TOKENS)


def tiny_processor() -> VLProcessor:
    """A processor with patches of 4 pixels.

    An image of 8 x 8 pixels is one visual token, one of 16 x 8 is two. A temporal patch, two frames
    of that size, gives as many; up to 8 frames of 16 x 8 keep their size.
    """
    image_processor = ImageProcessor(
        min_pixels=64,
        max_pixels=256,
        patch_size=4,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
    )
    video_processor = replace(
        VideoProcessor.like_images(image_processor), min_pixels=128, max_pixels=1024
    )
    return VLProcessor(tiny_tokenizer(), image_processor, video_processor)


def random_image(height: int, width: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def user(content) -> dict:
    return {"role": "user", "content": content}


def assistant(content) -> dict:
    return {"role": "assistant", "content": content}


def question(text: str = "What is this?", answer: str = "A cat.", **entries) -> dict:
    """A record with one question and its answer."""
    return {"messages": [user(text), assistant(answer)], **entries}


def write_jsonl(path: Path, rows: list) -> Path:
    """Write a JSONL file; string rows are written unchanged."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path
