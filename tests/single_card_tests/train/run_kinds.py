"""Tiny runs with adapters, of policies that are changed, and on LeRobot datasets."""

import json
from pathlib import Path

import yaml

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.families.vlm.folders.processor_fit import model_config
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from tests.single_card_tests.train.tiny_policy_run import MODEL as POLICY
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import MODEL, write_tiny_run
from tests.single_card_tests.train.whole_runs import build

LORA = {"r": 2, "target_modules": ["q_proj", "down_proj", "qkv"], "modules_to_save": ["mergers"]}
DATA = Path(__file__).parents[2] / "data" / "lerobot"
LANGUAGE, V21 = str(DATA / "v30_l06_language"), str(DATA / "v21_video")
FEATURES = POLICY["input_features"] | {"state": {"type": "STATE", "shape": [4]}}
MIXTURE = {
    "datasets": [{"root": LANGUAGE, "control_mode": "ee"}, {"root": V21, "excluded_episodes": [5]}],
    "weights": [2.0, 1.0],
    "action_freq": 10.0,
    "val_split_ratio": 0.3,
}


def _with_model(run_file: Path, **model: object) -> Path:
    settings = yaml.safe_load(run_file.read_text())
    settings["model"] = model
    run_file.write_text(yaml.safe_dump(settings))
    return run_file


def write_lora_run(folder: Path) -> Path:
    """Settings of adapters beside a base model, whose folder has the processor."""
    path = write_tiny_run(folder)
    processor = VLProcessor.from_pretrained(folder / "processor")
    config = model_config(Qwen3VLConfig, MODEL, processor)
    for each in (Qwen3VLForConditionalGeneration.from_config(config), processor):
        each.save_pretrained(folder / "base")
    return _with_model(path, pretrained=str(folder / "base"), lora=LORA)


def policy_base(run_file: Path, *settings: str) -> Path:
    """Make the settings start from what a run with them leaves."""
    trained = run_file.with_name("of_base")
    build(run_file, trained, "train.max_steps=1", "train.warmup_steps=0", *settings).run()
    (trained / "final").rename(run_file.with_name("base"))
    return _with_model(run_file, pretrained=str(run_file.with_name("base")))


def write_robot_run(folder: Path) -> Path:
    """A policy whose state has the size of the datasets'."""
    return write_tiny_policy_run(folder, input_features=FEATURES)


def with_mixture(**changes: object) -> list[str]:
    """Settings of `MIXTURE` with changes."""
    return ["data.train=[]", f"data.dataset_mixture={json.dumps(MIXTURE | changes)}"]
