"""The golden self-test: small models of the originals, whose numbers are stored, computed here.

`cases/` has a small Qwen3-VL, Qwen3.5, Qwen4-Exp and PaddleOCR-VL of HF transformers on torch:
weights, batch, loss, logits, every gradient and greedy tokens, made by `tools/make_doctor_case.py`.
They run on this machine's device and kernels.
"""

from functools import partial
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from paddle_vl.config.families import family_of_folder
from paddle_vl.doctor.check import CHECKS, Check, Machine, Result, ok, wrong
from paddle_vl.doctor.environment import uses_tf32
from paddle_vl.nn.examples import Dtype
from paddle_vl.testing import gather_gradients
from paddle_vl.testing.comparison import NEGLIGIBLE, differences
from paddle_vl.testing.tensors import as_array

# File of each case, and the name of its model.
CASES = {
    Path(__file__).parent / "cases" / f"{stem}.safetensors": model
    for stem, model in (
        ("qwen3_vl", "Qwen3-VL"),
        ("qwen3_5", "Qwen3.5"),
        ("qwen4_exp", "Qwen4-Exp"),
        ("paddleocr_vl", "PaddleOCR-VL"),
    )
}
_RESULTS = ("logits", "loss", "tokens")
_REMEDY = (
    "the model computes other numbers here: run kernels to see which operation does, and do not "
    "train"
)

Arrays = dict[str, np.ndarray]


def check_case(file: Path, dtype: Dtype, machine: Machine) -> Result:
    """Compare loss, logits, every gradient and, in float32, greedy tokens with the stored ones."""
    stored, config, made_with = read_case(file)
    batch, gradients = (
        {name.removeprefix(of): array for name, array in stored.items() if name.startswith(of)}
        for of in ("in.", "grad.")
    )
    weights = {
        name: array
        for name, array in stored.items()
        if not name.startswith(("in.", "grad.")) and name not in _RESULTS
    }
    folder = machine.folder / f"golden-{file.stem}-{dtype}"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(config, encoding="utf-8")
    model = family_of_folder(folder).model_class().from_pretrained(folder, dtype)
    output = model(**batch)
    output.loss.backward()
    real = batch["attention_mask"].astype(bool)
    loss = as_array(output.loss).reshape([1])
    found = {"loss": loss, "logits": as_array(output.logits)[real]}
    found |= {f"gradient of {name}": x for name, x in gather_gradients([model]).items()}
    wanted = {"loss": stored["loss"], "logits": stored["logits"][real]}
    wanted |= {f"gradient of {name}": array for name, array in gradients.items()}
    worst, bound = differences(found, wanted, NEGLIGIBLE, 1e-12)[0], _bound(machine, dtype)
    figures = {
        "made_with": made_with, "loss": float(loss[0]), "error": worst.error, "in": worst.name,
        "bound": bound,
    }  # fmt: skip
    if not worst.error <= bound:
        text = f"differs from HF's by {worst.error:.2g} of its largest entry: {worst.text}"
        return wrong(f"{text} (bound {bound:.0e})", _REMEDY, **figures)
    # The two best logits are as close as 2e-3 of the largest one: coarser ones may choose another.
    if dtype == "float32" and not uses_tf32():
        # The first sample without its last two tokens.
        patches, length = int(batch["image_grid_thw"][0].prod()), int(real[0].sum()) - 2
        tokens = model.generate(
            input_ids=batch["input_ids"][:1, :length],
            attention_mask=batch["attention_mask"][:1, :length],
            pixel_values=batch["pixel_values"][:patches],
            image_grid_thw=batch["image_grid_thw"][:1],
            max_new_tokens=stored["tokens"].shape[1],
            do_sample=False,
        )
        if tokens.tolist() != stored["tokens"].tolist():
            text = f"greedy tokens are {tokens.tolist()} instead of {stored['tokens'].tolist()}"
            return wrong(text, _REMEDY, **figures)
    return ok(
        f"loss {loss[0]:.6f}, {len(wanted)} tensors within {worst.error:.1e} (bound {bound:.0e})",
        **figures,
    )


def read_case(file: Path) -> tuple[Arrays, str, str]:
    """Arrays, config.json and versions of a stored case."""
    with safe_open(file, "numpy") as stored:
        metadata = stored.metadata()
        arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    return arrays, metadata["config"], metadata["made_with"]


def _bound(machine: Machine, dtype: Dtype) -> float:
    """Bound relative to the largest entry: TF32 keeps 10 bits, bfloat16 7, through all layers."""
    if dtype == "bfloat16":
        return 1e-1
    return 1e-2 if uses_tf32() else 2e-5 if machine.device == "cpu" else 1e-4


for _file, _model in CASES.items():
    _title = f"Loss, logits, gradients, tokens of HF's {_model}"
    CHECKS += [
        Check(f"golden.{_file.stem}", _title, partial(check_case, _file, "float32")),
        Check(
            f"golden.{_file.stem}_bfloat16",
            "The same in bfloat16",
            partial(check_case, _file, "bfloat16"),
            needs_bfloat16=True,
        ),
    ]
