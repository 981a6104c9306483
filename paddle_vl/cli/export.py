"""`paddle-vl export`: a model as static programs."""

import argparse
from pathlib import Path

from paddle_vl.cli.commands import configure_runtime, family_of_model
from paddle_vl.cli.table import BASE, Command, model, output, switch


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
