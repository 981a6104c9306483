"""A tiny run of PaddleOCR-VL on disk: pages of several tasks, a processor of its kind, settings."""

from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from paddle_vl.data.formats.otsl import TAGS
from paddle_vl.families.paddleocr_vl.inputs.processor import PaddleOCRVLProcessor
from tests.single_card_tests.train.tiny_run import MODEL_OCR, write_records

CORNERS = (0, 250, 500, 250, 500, 750, 0, 750)
SPOTTED = "total" + "".join(f"<|LOC_{value}|>" for value in CORNERS)
# Of each task one answer.
ANSWERS = {
    "text": "red blue\ntotal 12",
    "table": "<fcel>red<lcel><nl><fcel>12<ecel><nl>",
    "formula": r"\[ \frac{a}{b} \]",
    "spotting": SPOTTED,
}
_TOKENS = (*(f"<|LOC_{value}|>" for value in (0, 250, 500, 750, 1000)), *TAGS)
VOCABULARY = 340


def make_processor() -> PaddleOCRVLProcessor:
    return PaddleOCRVLProcessor.from_texts(
        [*ANSWERS.values()], VOCABULARY, patch_size=4, max_pixels=256, answer_tokens=_TOKENS
    )


def write_document_run(folder: Path, num_samples: int = 8) -> Path:
    """Write pages, train.jsonl, processor/ and run.yaml; return the path of run.yaml."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(num_samples):
        task = [*ANSWERS][number % len(ANSWERS)]
        pixels = rng.integers(0, 256, [8 + 8 * (number % 2), 16, 3], dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"page{number}.png")
        rows.append({"task": task, "image": f"page{number}.png", "answer": ANSWERS[task]})
    write_records(folder / "train.jsonl", rows)
    make_processor().save_pretrained(folder / "processor")
    settings = {
        "model": {"config": MODEL_OCR | {"vocab_size": VOCABULARY}},
        "data": {
            "train": [str(folder / "train.jsonl")],
            "processor": str(folder / "processor"),
            "checks": ["tables", "spotting", "text", "pixels"],
            "max_length": 128,
        },
        "train": {
            "output_dir": str(folder / "out"), "max_steps": 2, "per_device_train_batch_size": 2,
            "learning_rate": 0.01, "seed": 5,
        },
        "logging": {"logging_steps": 1, "progress_bar": False},
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path
