"""Made-up conversations about made-up pictures, as files: a run reads them as it reads its own."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from paddle_vl.data.tokenizer import TextTokenizer

CONVERSATIONS_FILE = "conversations.jsonl"
# Pictures to choose from; enough that no cache of one holds them all.
_NUM_PICTURES = 8
_WORD = " word"


@dataclass(frozen=True)
class ConversationShapes:
    """What every sample is made of.

    Attributes:
        num_images: pictures in each sample.
        image_side: pixels of their sides; the run's processor resizes them as any other.
        answer_tokens: tokens of the answer, which the loss is computed on.
    """

    num_images: int = 1
    image_side: int = 448
    answer_tokens: int = 64

    def __post_init__(self):
        if self.num_images < 0 or min(self.image_side, self.answer_tokens) < 1:
            raise ValueError(f"{self}: sizes must be at least 1, and no image is 0")


def write_conversations(
    folder: Path, shapes: ConversationShapes, num_samples: int, tokenizer: TextTokenizer
) -> Path:
    """Write pictures and a JSONL file, the same whenever and by whichever process.

    Returns:
        The JSONL file; it appears complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [f"{number}.png" for number in range(_NUM_PICTURES)]
    for number, name in enumerate(pictures):
        _appear(folder / name, _png(shapes.image_side, seed=number))
    messages = [
        {"role": "user", "content": "<image>" * shapes.num_images + "What is there to see?"},
        {"role": "assistant", "content": _answer(shapes.answer_tokens, tokenizer)},
    ]
    lines = []
    for number in range(num_samples):
        images = [pictures[(number + i) % _NUM_PICTURES] for i in range(shapes.num_images)]
        lines.append(json.dumps({"messages": messages, "images": images}) + "\n")
    file = folder / CONVERSATIONS_FILE
    _appear(file, "".join(lines).encode())
    return file


def _answer(num_tokens: int, tokenizer: TextTokenizer) -> str:
    """Words that make as many tokens, or as nearly below as whole words can."""
    low, high = 1, num_tokens
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(tokenizer.encode(_WORD * middle)) <= num_tokens
        low, high = (middle, high) if fits else (low, middle - 1)
    return (_WORD * low).strip()


def _png(side: int, seed: int) -> bytes:
    from io import BytesIO

    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    stream = BytesIO()
    Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(stream, "PNG")
    return stream.getvalue()


def _appear(file: Path, content: bytes) -> None:
    """Write a file at once: several processes may write the same."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(file)
