"""`paddle-vl export`: a model as static programs."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paddle_vl.cli.commands import configure_runtime, family_of_model
from paddle_vl.cli.table import BASE, Command, Option, model, output, switch

if TYPE_CHECKING:
    from paddle_vl.export.folder import ExportManifest


def export(options: argparse.Namespace) -> int:
    """Write the programs and print what they are."""
    configure_runtime()
    from paddle_vl.export.folder import program_file
    from paddle_vl.export.writing import check_dtype, check_output, export_model

    folder, family = family_of_model(options.model, options.base)
    out = Path(options.output)
    check_output(out)
    check_dtype(options.dtype, options.onnx)
    if options.onnx:
        from paddle_vl.export.onnx_writing import check_packages

        check_packages()
    traced = family.to_export(folder, options.base)
    manifest = export_model(traced, folder, out, options.onnx, options.dtype)
    programs = dict(manifest.programs)
    programs |= {program_file("onnx", name): program for name, program in manifest.onnx.items()}
    for name, program in programs.items():
        print(f"{name}: {len(program.inputs)} inputs, {program.num_outputs} outputs")
    for line in stored_weights_lines(manifest):
        print(line)
    size = sum(file.size for file in manifest.files.values())
    print(f"{len(manifest.files)} files of {size / 2**20:.0f} MiB in {out}")
    return 0


def stored_weights_lines(manifest: "ExportManifest") -> list[str]:
    """What an export says about weights that are not float32."""
    lines = []
    if manifest.gpu:
        was_run = "run here" if manifest.gpu_was_run else "traced here, not run: there is no GPU"
        lines.append(f"gpu/: programs that compute in {manifest.dtype} ({was_run})")
    for name, change in manifest.change.items():
        if not change.largest:
            continue
        text = (
            f"{name}: {manifest.dtype} weights change the answer to "
            f"the stored input by {change.largest:.2g} at most, {change.mean:.2g} on average, of "
            f"values up to {change.largest_value:.2g}"
        )
        if change.equal_argmax is not None:
            text += f"; {change.equal_argmax:.0%} of the most likely tokens are the same"
        lines.append(text)
    return lines


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
        Option(
            "--dtype",
            "of the stored weights; programs compute in float32, and with bfloat16 weights of "
            "Qwen3-VL in bfloat16 on a GPU (default float32)",
            {"default": "float32", "choices": ("float32", "bfloat16", "float16")},
        ),
    ],
    folders=("model", "output"),
)
