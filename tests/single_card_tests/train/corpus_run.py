"""A tiny pretraining run on disk: texts, captions, pages and conversations over the pictures of
`tiny_run`."""

from pathlib import Path

import numpy as np
import yaml

from tests.single_card_tests.train.tiny_run import MODEL, write_records, write_tiny_run

WORDS = ("red", "green", "blue", "which", "colour", "please", "yes")


def write_corpus_run(folder: Path, model: dict = MODEL) -> Path:
    """Write the data files and run.yaml; return its path. A micro-batch is two rows."""
    run_file = write_tiny_run(folder, model=model)
    rng = np.random.default_rng(1)

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS, words))

    def image() -> str:
        return f"images/{rng.integers(12)}.png"

    texts = [{"text": text(1 + int(rng.exponential(25)))} for _ in range(40)]
    captions = [{"image": image(), "text": text(3)} for _ in range(30)]
    pages = [
        {"texts": [text(9), None, text(5), None], "images": [None, image(), None, image()]}
        for _ in range(20)
    ]
    for name, rows in (("texts", texts), ("captions", captions), ("pages", pages)):
        write_records(folder / f"{name}.jsonl", rows)
    settings = yaml.safe_load(run_file.read_text(encoding="utf-8"))
    settings["data"] |= {
        "train": [
            {"path": str(folder / "texts.jsonl"), "format": "text", "weight": 3.0},
            {"path": str(folder / "captions.jsonl"), "format": "image_text", "weight": 1.0},
            {"path": str(folder / "pages.jsonl"), "format": "interleaved", "weight": 1.0},
            {"path": str(folder / "train.jsonl"), "name": "chats", "weight": 1.0},
        ],
        "packing": True,
        "packing_length": 192,
        "max_vision_tokens_per_row": 40,
    }
    run_file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return run_file
