"""`paddle-vl download` and `paddle-vl upload`, and the names of models in the settings of a run."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from paddle_vl.cli.table import Command, switch, value

_NAME = "org/name, with a hub's prefix (hf://, ms://) or a revision behind @ where it needs one"


def download(options: argparse.Namespace) -> int:
    """Print the folder."""
    from paddle_vl.files.hub import local_folder
    from paddle_vl.files.hub_names import hub_name

    kind = "dataset" if options.dataset else "model"
    chosen = {"revision": options.revision, "hub": options.hub, "kind": kind}
    if options.out and Path(options.out).exists():
        raise ValueError(f"--out {options.out} exists already: name a new folder")
    if hub_name(options.name, **chosen) is None:
        raise ValueError(f"{options.name} is a local path: write org/name, or hf://org/name")
    folder = local_folder(options.name, **chosen)
    if options.out:
        # Links of the cache become files.
        folder = Path(shutil.copytree(folder, options.out))
    print(folder)
    return 0


DOWNLOAD = Command(
    download,
    "download a model or a data set from a hub",
    "Download the needed files of a model, or a data set, into the hub's cache, and print the "
    "folder. Settings and options for a model's folder take its name, too: see docs/data.md.",
    "example:\n  paddle-vl download Qwen/Qwen3-VL-2B-Instruct --out models/qwen3-vl-2b",
    [
        value("name", "NAME", _NAME),
        value("--revision", "REV", "branch, tag or commit (default: the main branch)"),
        value("--hub", "HUB",
              "huggingface, modelscope or aistudio (default: PADDLE_VL_HUB, or huggingface)"),
        switch("--dataset", "it is a data set"),
        value("--out", "DIR", "copy the files into this new folder"),
    ],
)  # fmt: skip


def upload(options: argparse.Namespace) -> int:
    """Print the address of the commit."""
    from paddle_vl.files import huggingface
    from paddle_vl.files.hub_names import hub_name
    from paddle_vl.train.checkpoint import OPTIMIZER_STEM, STATE_FILE, model_folder

    name = hub_name(options.name, revision=options.revision)
    if name is None or name.hub != "huggingface" or name.kind != "model":
        raise ValueError(
            f"{options.name} is no model on Hugging Face: write hf://org/name; other hubs take "
            "models from their own clients, as by `modelscope upload NAME FOLDER`"
        )
    # What only resuming needs.
    without = [f"{OPTIMIZER_STEM}*", STATE_FILE]
    print(huggingface.upload(model_folder(Path(options.model)), name, options.private, without))
    return 0


UPLOAD = Command(
    upload,
    "upload a model to Hugging Face",
    "Upload a model folder, adapters or a run's final model to Hugging Face, and print the address "
    "of the commit. HF_TOKEN must be a token that may write.",
    "example:\n  paddle-vl upload runs/doors org/doors --private",
    [
        value("model", "FOLDER", "a model folder, or the output_dir of a run"),
        value("name", "NAME", _NAME),
        switch("--private", "a new repository is private; one that is public is refused"),
        value("--revision", "BRANCH", "branch, made where there is none (default: main)"),
    ],
)


def read_run(options: argparse.Namespace) -> Any:
    """The settings of a run; models that they name on a hub are downloaded.

    The folders become overrides, so that ranks look nothing up.
    """
    from paddle_vl.config.load import load_run_config
    from paddle_vl.files.hub import path_or_download

    def find(setting: str, value: str) -> str:
        try:
            folder = path_or_download(value)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(f"{setting}: {error}") from error
        if folder == Path(value):
            return value
        options.overrides.append(f"{setting}={json.dumps(str(folder))}")
        return str(folder)

    return load_run_config(options.config, options.overrides, find)
