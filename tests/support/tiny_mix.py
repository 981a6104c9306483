"""A tiny pretraining run on disk: text, captions and pages, processor, settings."""

import json
from pathlib import Path

import yaml

from paddle_vl.testing.tiny_run import write_pictures, write_processor
from tests.single_card_tests.train.tiny_run import MODEL

SAVE_STEPS, MAX_TOKENS = 3, 5000


def write_mix(folder: Path) -> Path:
    """Text, captions and pages with small images, a processor and settings; returns run.yaml."""
    pictures = [(name, str(file)) for name, file in write_pictures(folder, 12)]
    rows = {
        "text": [{"text": f"Number {n} of the texts. " * (n % 7 + 1)} for n in range(20)],
        "captions": [{"image": file, "text": f"All {name}."} for name, file in pictures],
        "pages": [
            {
                "texts": ["One:", None, f"{pictures[n][0]}, another:", None, "the end"],
                "images": [None, pictures[n][1], None, pictures[-n][1], None],
            }
            for n in range(9)
        ],
    }
    for name, of_source in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in of_source)
        (folder / f"{name}.jsonl").write_text(text)
        (folder / f"{name}_held_out.jsonl").write_text("".join(text.splitlines(True)[:3]))
    write_processor(
        folder / "processor", "Number of the texts. All red green blue another: the end"
    )
    formats = {"text": "text", "captions": "image_text", "pages": "interleaved"}
    weights = {"text": 0.5, "captions": 0.2, "pages": 0.3}

    def source(name: str, suffix: str = "") -> dict:
        return {
            "name": name,
            "path": str(folder / f"{name}{suffix}.jsonl"),
            "format": formats[name],
        }

    # A key head for each tensor-parallel rank.
    text_config = MODEL["text_config"] | {"num_key_value_heads": 2}
    settings = {
        "model": {"config": MODEL | {"text_config": text_config}},
        "data": {
            "train": [source(name) | {"weight": weight} for name, weight in weights.items()],
            "eval": [source(name, "_held_out") for name in formats],
            "processor": str(folder / "processor"),
            "max_length": 128,
            "packing": True,
            "pad_to_multiple_of": 2,
        },
        "train": {
            "max_tokens": MAX_TOKENS,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.01,
            "warmup_ratio": 0.1,
            "lr_scheduler_type": "warmup_stable_decay",
            "decay_ratio": 0.5,
            "eval_steps": 4,
            "save_steps": SAVE_STEPS,
            "seed": 5,
        },
        "logging": {"logging_steps": 1, "progress_bar": False},
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path
