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
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from paddle_vl.doctor.check import Machine, Result, check, ok, wrong
from paddle_vl.doctor.measuring import uses_tf32
from paddle_vl.nn.examples import Dtype
from paddle_vl.testing import gather_gradients, tiny_pi07, tiny_pi07_batch, tiny_qwen3_vl
from paddle_vl.testing.comparison import NEGLIGIBLE, differences
from paddle_vl.testing.tensors import as_array

CASES = Path(__file__).parent / "cases"
QWEN3_VL, PI07 = CASES / "qwen3_vl.safetensors", CASES / "pi07.json"
_REMEDY = (
    "the model computes other numbers here: run kernels, attention and simulated to see which "
    "operation does, and do not train"
)

Arrays = dict[str, np.ndarray]


@check("golden.qwen3_vl")
def golden_qwen3_vl(machine: Machine, dtype: Dtype = "float32", file: Path = QWEN3_VL) -> Result:
    """Loss, logits, gradients, tokens of HF's Qwen3-VL."""
    stored, config, made_with = read_case(file)
    folder = machine.folder / f"golden-{dtype}"
    folder.mkdir()
    batch, wanted, weights = {}, {}, {}
    for name, array in stored.items():
        if name.startswith("in."):
            batch[name[3:]] = array
        elif name.startswith("grad."):
            wanted[f"gradient of {name[5:]}"] = array
        elif name not in ("logits", "loss", "tokens"):
            weights[name] = array
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(config, encoding="utf-8")
    model = type(tiny_qwen3_vl()).from_pretrained(folder, dtype)
    output = model(**batch)
    output.loss.backward()
    real = batch["attention_mask"].astype(bool)
    found = {f"gradient of {name}": array for name, array in gather_gradients([model]).items()}
    found |= {"loss": as_array(output.loss).reshape([1]), "logits": as_array(output.logits)[real]}
    wanted |= {"loss": stored["loss"], "logits": stored["logits"][real]}
    result = _compared(found, wanted, "HF's", _bound(machine, dtype), made_with=made_with)
    if dtype == "bfloat16" or machine.device != "cpu" or result.status == "wrong":
        return result
    # The first sample without its last two tokens.
    patches = int(batch["image_grid_thw"][0].prod())
    tokens = model.generate(
        input_ids=batch["input_ids"][:1, :-2],
        attention_mask=batch["attention_mask"][:1, :-2],
        pixel_values=batch["pixel_values"][:patches],
        image_grid_thw=batch["image_grid_thw"][:1],
        max_new_tokens=stored["tokens"].shape[1],
        do_sample=False,
    )
    if tokens.tolist() != stored["tokens"].tolist():
        text = f"greedy tokens are {tokens.tolist()} instead of {stored['tokens'].tolist()}"
        return wrong(text, _REMEDY, **result.figures)
    return result


@check("golden.qwen3_vl_bfloat16", need="bfloat16")
def golden_qwen3_vl_bfloat16(machine: Machine) -> Result:
    """The same in bfloat16."""
    return golden_qwen3_vl(machine, "bfloat16")


def read_case(file: Path) -> tuple[Arrays, str, str]:
    """Arrays, config.json and versions of a stored case."""
    with safe_open(file, "numpy") as stored:
        metadata = stored.metadata()
        arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    return arrays, metadata["config"], metadata["made_with"]


@check("golden.pi07")
def golden_pi07(machine: Machine, file: Path = PI07) -> Result:
    """Losses and gradients of a pi07 policy."""
    wanted = _by_tensor(json.loads(file.read_text(encoding="utf-8")))
    # Norms of the whole gradient and projections of it add up thousands of roundings.
    return _compared(
        _by_tensor(pi07_values()), wanted, "the stored case's", 5 * _bound(machine, "float32")
    )


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
        if parameter.grad is None:
            continue
        flat = as_array(parameter.grad).astype(np.float64).ravel()
        direction = formula(flat.size, 1000 + number).astype(np.float64)
        found[f"{name}.norm"] = float(np.linalg.norm(flat))
        # Of a random direction; its typical size is that of the norm.
        found[f"{name}.projection"] = float(flat @ direction) * math.sqrt(3)
    return found


def formula(size: int, seed: int) -> np.ndarray:
    """`[size]` float32 in [-1, 1), from whole numbers alone: the same with every library."""
    x = np.arange(1, size + 1, dtype=np.uint64) + np.uint64(seed << 32)
    # The finalizer of SplitMix64; products wrap around.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return ((x >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23)) - np.float32(1)


def _by_tensor(values: Mapping[str, float]) -> Arrays:
    """Norm and projection of a gradient together, so that errors are relative to the larger one."""
    lists: dict[str, list[float]] = {}
    for name, value in values.items():
        tensor, _, what = name.rpartition(".")
        lists.setdefault(f"gradient of {tensor}" if tensor else what, []).append(value)
    return {name: np.array(entries) for name, entries in lists.items()}


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


def _bound(machine: Machine, dtype: str) -> float:
    """Bound relative to the largest entry: TF32 keeps 10 bits, bfloat16 7, through all layers."""
    if dtype == "bfloat16":
        return 1e-1
    return 1e-2 if uses_tf32() else 2e-5 if machine.device == "cpu" else 1e-4


def _compared(found: Arrays, wanted: Arrays, whose: str, bound: float, **facts: Any) -> Result:
    worst = differences(found, wanted, NEGLIGIBLE, 1e-12)[0]
    figures = {**facts, "error": worst.error, "in": worst.name, "bound": bound}
    losses = {name: float(array[0]) for name, array in found.items() if array.shape == (1,)}
    if not worst.error <= bound:
        text = f"differs from {whose} by {worst.error:.2g} of its largest entry: {worst.text}"
        return wrong(f"{text} (bound {bound:.0e})", _REMEDY, **figures, **losses)
    told = ", ".join(f"{name} {value:.6f}" for name, value in losses.items())
    return ok(
        f"{told}, {len(wanted)} tensors within {worst.error:.1e} (bound {bound:.0e})",
        **figures,
        **losses,
    )
