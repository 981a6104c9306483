"""A tiny run that learns preferences, beside its base model."""

import json
import zlib
from pathlib import Path
from typing import Any

import paddle

from paddle_vl.config.families import family_of
from paddle_vl.families.vlm.folders.processor_fit import model_config
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from tests.single_card_tests.train.tiny_run import MODEL, write_records, write_tiny_run

ANSWERS = ("red", "green", "blue", "yes", "no red", "a blue one")
PREFERENCE = "train.objective=preference"


def write_preference_run(folder: Path, num_samples: int, model: dict[str, Any] = MODEL) -> Path:
    """Pairs with two images, one, none, or one for each answer, of different lengths; the same rows
    rated, as `rated.jsonl`; the base model in `base`."""
    run_file = write_tiny_run(folder, num_samples, model)
    write_base(run_file, model)
    lines = run_file.with_name("train.jsonl").read_text().splitlines()
    pairs, rated = [], []
    for number, record in enumerate(map(json.loads, lines)):
        images = [record["images"] * 2, record["images"], [], record["images"]][number % 4]
        question = "<image>" * len(images) + "Which colour?" + " Please." * (number % 3)
        answers = [ANSWERS[(number + shift) % len(ANSWERS)] for shift in (0, 1 + number % 2)]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answers[0]},
        ]
        pair = {"messages": messages, "images": images, "rejected_response": answers[1]}
        if number % 4 == 3:
            other = json.loads(lines[(number + 1) % len(lines)])["images"]
            pair["rejected_images"] = other
        pairs.append(pair)
        rated.append({"messages": messages, "images": images, "label": number % 3 != 0})
    write_records(run_file.with_name("train.jsonl"), pairs)
    write_records(run_file.with_name("test.jsonl"), pairs[:5])
    write_records(run_file.with_name("rated.jsonl"), rated)
    return run_file


def write_base(run_file: Path, model: dict[str, Any], seed: int | None = None) -> None:
    """Write the base model of a run beside its file."""
    processor = VLProcessor.from_pretrained(run_file.with_name("processor"))
    # Whatever ran before: the same weights would be another run's reference too.
    paddle.seed(zlib.crc32(str(run_file.parent).encode()) if seed is None else seed)
    model_class = family_of(model).model_class()
    base = model_class.from_config(model_config(model_class.config_class, model, processor))
    base.save_pretrained(run_file.with_name("base"))


def base_settings(run_file: Path) -> list[str]:
    """Settings of a run of preferences from the base model."""
    return [PREFERENCE, "model.config=null", f"model.pretrained={run_file.with_name('base')}"]
