"""A complete tiny captioner run on disk."""

from pathlib import Path

import yaml

from paddle_vl.config.load import load_run_config
from paddle_vl.train.build import build_trainer
from tests.support.captioner.inputs import make_tokenizer, write_captions

SHAPE = 4, 6


def write_captioner_run(folder: Path) -> Path:
    """Write captions, tokenizer and `run.yaml`; returns the path of `run.yaml`."""
    write_captions(folder / "train.jsonl", 24, SHAPE)
    write_captions(folder / "test.jsonl", 7, SHAPE, seed=1)
    make_tokenizer().save(folder / "tokenizer")
    settings = {
        "model": {
            "config": {
                "model_type": "captioner",
                "vocab_size": 280,
                "num_regions": SHAPE[0],
                "num_features": SHAPE[1],
            }
        },
        "data": {
            "train": [str(folder / "train.jsonl")],
            "eval": [str(folder / "test.jsonl")],
            "processor": str(folder / "tokenizer"),
        },
        "train": {
            "output_dir": str(folder / "out"),
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.01,
            "save_steps": 2,
            "eval_steps": 2,
            "seed": 5,
        },
        "logging": {"logging_steps": 1, "progress_bar": False},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def train_captioner(run_file: str | Path, output_dir: str | Path, *overrides: str) -> Path:
    """Run a full training; returns its output folder."""
    config = load_run_config(run_file, [f"train.output_dir={output_dir}", *overrides])
    assert build_trainer(config).run() is None
    return Path(output_dir)
