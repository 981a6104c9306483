"""Models of both families against stored values.

`cases/qwen3_vl.safetensors` is a small Qwen3-VL of HF transformers on torch: weights, batch, loss,
logits, every gradient and greedy tokens, made by `tools/make_doctor_case.py`. `cases/pi07.json` has
the losses of a small policy, and the size and one projection of every gradient. Its weights and
inputs follow from a formula; its values are those of this package's plain operations on a CPU,
which `tests/golden` holds to OpenTau's.
"""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from paddle_vl.doctor.check import BFLOAT16, Check, Machine, Result, ok, wrong
from paddle_vl.doctor.precision import uses_tf32
from paddle_vl.nn.adamw import gradient_of
from paddle_vl.testing import gather_gradients, tiny_pi07, tiny_pi07_batch, tiny_qwen3_vl

CASES = Path(__file__).parent / "cases"
QWEN3_VL, PI07 = CASES / "qwen3_vl.safetensors", CASES / "pi07.json"
# Gradients below this part of the largest one are rounding, such as those of key biases.
_NEGLIGIBLE = 1e-4
_REMEDY = (
    "the model computes other numbers here: run kernels, attention and simulated to see which "
    "operation does, and do not train"
)


def checks(machine: Machine) -> list[Check]:
    return [
        Check("golden.qwen3_vl", "loss, logits, gradients, tokens of HF's Qwen3-VL", _qwen3_vl),
        Check(
            "golden.qwen3_vl_bfloat16",
            "the same in bfloat16",
            partial(_qwen3_vl, dtype="bfloat16"),
            (BFLOAT16,),
        ),
        Check("golden.pi07", "losses and gradients of a pi07 policy", _pi07),
    ]


def _qwen3_vl(machine: Machine, dtype: str = "float32", file: Path = QWEN3_VL) -> Result:
    stored, config, made_with = read_case(file)
    folder = machine.folder / f"golden-{dtype}"
    folder.mkdir()
    weights = {
        name: array
        for name, array in stored.items()
        if not name.startswith(("in.", "grad.")) and name not in ("logits", "loss", "tokens")
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(config, encoding="utf-8")
    model = type(tiny_qwen3_vl()).from_pretrained(folder, dtype)
    batch = {name[3:]: array for name, array in stored.items() if name.startswith("in.")}
    output = model(**batch)
    output.loss.backward()
    real = batch["attention_mask"].astype(bool)
    logits = output.logits.detach().astype("float32").numpy()
    found = {"loss": np.array(float(output.loss)), "logits": logits[real]}
    wanted = {"loss": stored["loss"][0], "logits": stored["logits"][real]}
    found |= {f"grad.{name}": array for name, array in gather_gradients([model]).items()}
    wanted |= {name: array for name, array in stored.items() if name.startswith("grad.")}
    bound = _bound(machine, dtype)
    error, where = largest_error(found, wanted)
    figures = {"made_with": made_with, "error": error, "in": where, "bound": bound}
    figures |= {"loss": float(found["loss"]), "reference_loss": float(wanted["loss"])}
    if not error <= bound:
        return wrong(
            f"{where} differs from HF's by {error:.2g} of its largest entry (bound {bound:.0e})",
            _REMEDY,
            **figures,
        )
    if dtype == "float32":
        tokens = model.generate(**_prompt(batch), max_new_tokens=stored["tokens"].shape[1],
                                do_sample=False)  # fmt: skip
        figures |= {"tokens": tokens.tolist()}
        if machine.device == "cpu" and tokens.tolist() != stored["tokens"].tolist():
            return wrong(
                f"greedy tokens are {tokens.tolist()} instead of {stored['tokens'].tolist()}",
                _REMEDY,
                **figures,
            )
    return ok(
        f"loss {figures['loss']:.6f}, {len(wanted)} tensors within {error:.1e} (bound {bound:.0e})",
        **figures,
    )


def _bound(machine: Machine, dtype: str) -> float:
    """Bound relative to the largest entry: TF32 keeps 10 bits, bfloat16 7, through all layers."""
    if dtype == "bfloat16":
        return 1e-1
    return 1e-2 if uses_tf32() else 2e-5 if machine.device == "cpu" else 1e-4


def read_case(file: Path) -> tuple[dict[str, np.ndarray], str, str]:
    """Arrays, config.json and versions of a stored case."""
    with safe_open(file, "numpy") as stored:
        metadata = stored.metadata()
        arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    return arrays, metadata["config"], metadata["made_with"]


def _prompt(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The first sample without its last two tokens."""
    patches = int(batch["image_grid_thw"][0].prod())
    return {
        "input_ids": batch["input_ids"][:1, :-2],
        "attention_mask": batch["attention_mask"][:1, :-2],
        "pixel_values": batch["pixel_values"][:patches],
        "image_grid_thw": batch["image_grid_thw"][:1],
    }


def largest_error(
    found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]
) -> tuple[float, str]:
    """The largest difference relative to the largest entry of its tensor, and the tensor."""
    if found.keys() != wanted.keys():
        return math.inf, f"the set of tensors ({sorted(found.keys() ^ wanted.keys())[:3]})"
    sizes = {name: float(np.abs(array).max(initial=0.0)) for name, array in wanted.items()}
    least = _NEGLIGIBLE * max(sizes[name] for name in sizes if name.startswith("grad."))
    errors = []
    for name, array in wanted.items():
        own = np.asarray(found[name], np.float64)
        if own.shape != array.shape:
            return math.inf, f"the shape of {name}"
        size = max(sizes[name], least if name.startswith("grad.") else 1e-12)
        errors.append((float(np.abs(own - array).max(initial=0.0)) / size, name))
    return max(errors, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])


def formula(size: int, seed: int) -> np.ndarray:
    """`[size]` float32 in [-1, 1), from whole numbers alone: the same with every library."""
    x = np.arange(1, size + 1, dtype=np.uint64) + np.uint64(seed << 32)
    # The finalizer of SplitMix64; products wrap around.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return ((x >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23)) - np.float32(1)


def pi07_values() -> dict[str, float]:
    """Losses of the small policy, and the norm and a projection of every gradient."""
    model = tiny_pi07()
    for number, parameter in enumerate(model.parameters()):
        value = formula(int(np.prod(parameter.shape)), number).reshape(parameter.shape)
        scale = 0.1 if len(parameter.shape) == 1 else 1.4 / math.sqrt(parameter.shape[0])
        parameter.set_value((np.float32(scale) * value).astype(np.float32))
    losses = model(_pi07_batch())
    (losses["MSE"] + losses["CE"]).backward()
    found = {"MSE": float(losses["MSE"]), "CE": float(losses["CE"])}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        gradient = gradient_of(parameter)
        if gradient is None:
            continue
        flat = gradient.astype("float32").numpy().astype(np.float64).ravel()
        direction = formula(flat.size, 1000 + number).astype(np.float64)
        found[f"{name}.norm"] = float(np.linalg.norm(flat))
        # Of a random direction; its typical size is that of the norm.
        found[f"{name}.projection"] = float(flat @ direction) * math.sqrt(3)
    return found


def _pi07_batch() -> dict[str, Any]:
    """The tiny batch with floats from the formula, and masks and tokens from a rule."""
    seeds = iter(range(2000, 3000))

    def made(value: Any) -> Any:
        if isinstance(value, list):
            return [made(entry) for entry in value]
        unit = formula(value.size, next(seeds)).reshape(value.shape)
        if value.dtype == np.float32:
            return (unit + 1) / 2
        if value.dtype == bool:
            return unit < 0.6
        # The smallest table has 40 entries.
        return ((unit + 1) * 20).astype(np.int64).clip(0, 39)

    kept = ("obs_history_is_pad", "vid_masks", "delay", "subgoal_img_masks")
    return {
        name: value if name in kept else made(value) for name, value in tiny_pi07_batch(2).items()
    }


def _pi07(machine: Machine, file: Path = PI07) -> Result:
    wanted = json.loads(file.read_text(encoding="utf-8"))
    found = pi07_values()
    # Norms of the whole gradient and projections of it add up thousands of roundings.
    bound = 5 * _bound(machine, "float32")
    if found.keys() != wanted.keys():
        return wrong(
            f"the parameters with a gradient differ: {sorted(found.keys() ^ wanted.keys())[:3]}",
            _REMEDY,
        )
    least = _NEGLIGIBLE * max(wanted[name] for name in wanted if name.endswith(".norm"))
    errors = {}
    for name, value in wanted.items():
        norm = wanted.get(f"{name.rpartition('.')[0]}.norm", 0.0)
        size = max(abs(value), norm, least) if "." in name else abs(value)
        errors[name] = abs(found[name] - value) / size
    where = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    figures = {"MSE": found["MSE"], "CE": found["CE"], "error": errors[where], "in": where}
    if not errors[where] <= bound:
        return wrong(
            f"{where} is {found[where]:.6g} instead of {wanted[where]:.6g}, off by "
            f"{errors[where]:.2g} (bound {bound:.0e})",
            _REMEDY,
            **figures,
        )
    return ok(
        f"MSE {found['MSE']:.6f}, CE {found['CE']:.6f}, {len(wanted)} values within "
        f"{errors[where]:.1e} (bound {bound:.0e})",
        **figures,
    )
