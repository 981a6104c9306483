"""`paddle-vl export`: a model as static programs; `check-folder`: a folder for an engine."""

import argparse
from pathlib import Path

from paddle_vl.cli.commands import configure_runtime, family_of_model
from paddle_vl.cli.table import BASE, Command, model, output, switch, value


def export(options: argparse.Namespace) -> int:
    """Write the programs and print what they are."""
    configure_runtime()
    from paddle_vl.export.folder import program_file
    from paddle_vl.export.writing import check_output, export_model

    folder, family = family_of_model(options.model, options.base)
    out = Path(options.output)
    check_output(out)
    if options.onnx:
        from paddle_vl.export.onnx_writing import check_packages

        check_packages()
    traced = family.ask("export", folder, options.base)
    manifest = export_model(traced, folder, out, options.onnx)
    programs = dict(manifest.programs)
    programs |= {program_file("onnx", name): program for name, program in manifest.onnx.items()}
    for name, program in programs.items():
        print(f"{name}: {len(program.inputs)} inputs, {program.num_outputs} outputs")
    size = sum(file.size for file in manifest.files.values())
    print(f"{len(manifest.files)} files of {size / 2**20:.0f} MiB in {out}")
    return 0


EXPORT = Command(
    export,
    "write a model as static programs for serving",
    "Trace a model into static programs that run without its code, on paddle.inference: see "
    "paddle_vl.export.load. Adapters are merged into their base model. Batch, lengths, image sizes "
    "and their number stay free.",
    "example:\n  paddle-vl export --model runs/digits --output exports/digits",
    [
        model(),
        output("the new folder"),
        BASE,
        switch("--onnx", "write the programs in ONNX, too (needs the extra paddle-vl[onnx])"),
    ],
    folders=("model", "output"),
)


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
    "whether vLLM, SGLang, FastDeploy, PaddleX or transformers serves a model folder",
    "Compare a model folder, or adapters and their base, with what an engine reads. Prints what is "
    "refused, missing, lost (the engine says nothing, and answers differ), unchecked (paddle-vl "
    "cannot read it) and ignored (answers are the same); the exit code is 1 for the first four. "
    "See docs/export.md.",
    "example:\n  paddle-vl check-folder runs/doors --for vllm",
    [
        model(),
        value("--for", "ENGINE", "vllm, sglang, fastdeploy, transformers or paddlex",
              dest="engine", required=True,
              choices=("vllm", "sglang", "fastdeploy", "transformers", "paddlex")),
        BASE,
    ],
    folders=("model",),
)  # fmt: skip
