"""Synthetic conversations about synthetic images, written as data files for a profile."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from paddle_vl.config.families import FamilyEntry
from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer
from paddle_vl.families.vlm.settings import VLRun, processor_folder
from paddle_vl.files.text_file import replacing

CONVERSATIONS_FILE = "conversations.jsonl"
# Distinct image files, so that reading is not hidden by the page cache of a single one.
_NUM_IMAGES = 8
_WORD = " word"


def with_synthetic_data(
    family: FamilyEntry, config: VLRun, folder: Path, num_samples: int, shapes: Mapping[str, int]
) -> VLRun:
    """The run with conversations in files; `cameras` are the images of each, one by default."""
    tokenizer = TextTokenizer.from_file(processor_folder(config))
    given = {"num_images" if name == "cameras" else name: shapes[name] for name in shapes}
    file = write_conversations(folder / "data", num_samples, tokenizer, **given)
    values = config.model_dump()
    values["data"]["train"] = [str(file)]
    return type(config).model_validate(values)


def write_conversations(
    folder: Path,
    num_samples: int,
    tokenizer: TextTokenizer,
    *,
    num_images: int = 1,
    image_side: int = 448,
    answer_tokens: int = 64,
) -> Path:
    """Write images and a JSONL file, deterministically; several ranks may do so at once.

    Args:
        num_images: images of a sample.
        image_side: height and width of an image in pixels, before the processor resizes it.
        answer_tokens: tokens of the answer, which the loss counts.

    Returns:
        The JSONL file. Files are written atomically.

    Raises:
        ValueError: a size below 1, or a number of images below 0.
    """
    if num_images < 0 or min(image_side, answer_tokens) < 1:
        raise ValueError(
            f"{num_images} images of side {image_side} and {answer_tokens} tokens: sizes must be "
            "at least 1, and no image is 0"
        )
    folder.mkdir(parents=True, exist_ok=True)
    files = [f"{number}.png" for number in range(_NUM_IMAGES)]
    for number, name in enumerate(files):
        coarse = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((image_side, image_side), Image.Resampling.BICUBIC)
        with replacing(folder / name) as partial:
            image.save(partial, "PNG")
    messages = [
        {"role": "user", "content": "<image>" * num_images + "What is there to see?"},
        {"role": "assistant", "content": _answer(answer_tokens, tokenizer)},
    ]
    lines = []
    for number in range(num_samples):
        images = [files[(number + i) % _NUM_IMAGES] for i in range(num_images)]
        lines.append(json.dumps({"messages": messages, "images": images}) + "\n")
    file = folder / CONVERSATIONS_FILE
    with replacing(file) as partial:
        partial.write_bytes("".join(lines).encode())
    return file


def _answer(num_tokens: int, tokenizer: TextTokenizer) -> str:
    """A text of that many tokens, or slightly fewer."""
    low, high = 1, num_tokens
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(tokenizer.encode(_WORD * middle)) <= num_tokens
        low, high = (middle, high) if fits else (low, middle - 1)
    return (_WORD * low).strip()
