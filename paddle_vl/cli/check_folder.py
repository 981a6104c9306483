"""`paddle-vl check-folder`: whether an engine serves a model folder."""

import argparse

from paddle_vl.cli.commands import configure_runtime
from paddle_vl.cli.table import BASE, Command, Option, model

_ENGINES = ("vllm", "sglang", "fastdeploy", "transformers")


def check_folder(options: argparse.Namespace) -> int:
    """Print what was found; 1 if the engine would not serve the folder as it was trained."""
    configure_runtime()
    from paddle_vl.checkpoint.adapter_files import base_folder, is_adapter
    from paddle_vl.families.vlm import folder_check
    from paddle_vl.families.vlm.engines import ENGINES, Finding
    from paddle_vl.files.hub import path_or_download
    from paddle_vl.train.checkpoint import model_folder

    engine = ENGINES[options.engine]
    folder = model_folder(path_or_download(options.model), verified=False)
    base = base_folder(folder, options.base) if is_adapter(folder) else folder
    print(f"{folder} for {options.engine}" + (f", with {base}" if base != folder else ""))
    is_served = True
    for kind, text in folder_check.check_folder(folder, base, engine):
        print(f"{kind.value}: {text}")
        is_served &= kind in (Finding.IGNORED, Finding.NOTE)
    print(f"{'fits' if is_served else 'does not fit'} the rules of {engine.sources}")
    return 0 if is_served else 1


CHECK_FOLDER = Command(
    check_folder,
    "whether vLLM, SGLang, FastDeploy or transformers serves a model folder",
    "Compare a model folder, or adapters and their base, with what an engine reads; weights are "
    "not read. Prints what is refused, missing, lost (the engine says nothing, and answers differ) "
    "and ignored (they do not); the exit code is 1 for the first three. See docs/serving.md.",
    "example:\n  paddle-vl check-folder runs/doors --for vllm",
    [
        model(),
        Option("--for", "the engine", {"dest": "engine", "choices": _ENGINES, "required": True}),
        BASE,
    ],
    folders=("model",),
)
