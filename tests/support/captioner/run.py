"""A complete tiny captioner run on disk."""

from pathlib import Path

import yaml

from paddle_vl.config.load import load_run_config
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_run import MODEL, write_tiny_run


def write_captioner_run(folder: Path) -> Path:
    """Write pictures, questions, processor and `run.yaml`; returns the path of `run.yaml`."""
    text = {"vocab_size": 280, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MODEL | {"model_type": "captioner", "text_config": text}
    path = write_tiny_run(folder, num_samples=24, model=model)
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings["data"] |= {"eval": [str(folder / "test.jsonl")], "pad_to_multiple_of": 2}
    settings["train"] |= {"save_steps": 2, "eval_steps": 2, "per_device_train_batch_size": 4}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def train_captioner(run_file: str | Path, output_dir: str | Path, *overrides: str) -> Path:
    """Run a full training; returns its output folder."""
    config = load_run_config(run_file, [f"train.output_dir={output_dir}", *overrides])
    assert build_trainer(config).run() is None
    return Path(output_dir)
