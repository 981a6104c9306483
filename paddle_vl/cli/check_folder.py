"""`paddle-vl check-folder`: whether an engine serves a model folder."""

import argparse

from paddle_vl.cli.commands import configure_runtime
from paddle_vl.cli.table import BASE, Command, model, value


def check_folder(options: argparse.Namespace) -> int:
    """Print what was found; 1 if the engine would not serve the folder as it was trained, or that
    is not known."""
    configure_runtime()
    from paddle_vl.checkpoint.adapter_files import base_folder, is_adapter
    from paddle_vl.config.families import family_of_folder
    from paddle_vl.files.hub import path_or_download
    from paddle_vl.train.checkpoint import model_folder

    folder = model_folder(path_or_download(options.model), verified=False)
    base = base_folder(folder, options.base) if is_adapter(folder) else folder
    family = family_of_folder(base)
    fits, lines = False, [f"refused: {options.engine} has no models of this family"]
    if "check_folder" in family.capabilities:
        fits, lines = family.ask("check_folder", folder, base, options.engine)
    print(f"{folder} for {options.engine}", *lines, sep="\n")
    return 0 if fits else 1


CHECK_FOLDER = Command(
    check_folder,
    "whether vLLM, SGLang, FastDeploy or transformers serves a model folder",
    "Compare a model folder, or adapters and their base, with what an engine reads. Prints what is "
    "refused, missing, lost (the engine says nothing, and answers differ), unchecked (paddle-vl "
    "cannot read it) and ignored (answers are the same); the exit code is 1 for the first four. "
    "See docs/export.md.",
    "example:\n  paddle-vl check-folder runs/doors --for vllm",
    [
        model(),
        value("--for", "ENGINE", "vllm, sglang, fastdeploy or transformers", dest="engine",
              required=True, choices=("vllm", "sglang", "fastdeploy", "transformers")),
        BASE,
    ],
    folders=("model",),
)  # fmt: skip
