"""Tiny models: stored values, ranks against one device, generation, and a resumed run.

`cases/` has a small Qwen3-VL and a small Qwen3.5 of HF transformers on torch: weights, batch, loss,
logits, every gradient and greedy tokens, made by `tools/make_doctor_case.py`.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from safetensors import safe_open
from safetensors.numpy import save_file

from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.config.families import family_of_folder
from paddle_vl.config.load import load_run_config
from paddle_vl.config.schema import TrainConfig
from paddle_vl.doctor.check import Machine, Result, check, ok, wrong
from paddle_vl.doctor.environment import existing_flags, uses_tf32
from paddle_vl.doctor.kernels import on_host
from paddle_vl.nn.dispatch import use_kernels
from paddle_vl.nn.examples import Dtype
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.testing import (
    Image,
    assert_equals_single_device,
    emulated_bfloat16,
    gather_gradients,
    tiny_pi07,
    tiny_pi07_batch,
    tiny_qwen3_5,
    tiny_qwen3_vl,
    tiny_qwen3_vl_batch,
)
from paddle_vl.testing.comparison import NEGLIGIBLE, differences
from paddle_vl.testing.qwen3_vl import EXPERTS
from paddle_vl.testing.tensors import as_array
from paddle_vl.testing.tiny_run import write_tiny_run
from paddle_vl.train.build import build_trainer
from paddle_vl.train.optimizer import Optimizer

QWEN3_VL, QWEN3_5 = (
    Path(__file__).parent / "cases" / f"{name}.safetensors" for name in ("qwen3_vl", "qwen3_5")
)
_OTHER_NUMBERS = (
    "the model computes other numbers here: run kernels, attention and simulated to see which "
    "operation does, and do not train"
)
_TOKENS = 8
# Where the two best logits are closer than this, either may win.
_GAP = {"float32": 1e-3, "bfloat16": 1e-1}
_CURVE_STEPS, _RATE = 50, 1e-3
_CURVE_BOUND = 0.05
_RUN_STEPS, _SAVED = 4, 2
# Without these a GPU adds in an order that changes from run to run.
_DETERMINISTIC = ("FLAGS_cudnn_deterministic", "FLAGS_embedding_deterministic")

Arrays = dict[str, np.ndarray]


@check("golden.qwen3_vl")
def golden_qwen3_vl(machine: Machine, dtype: Dtype = "float32", file: Path = QWEN3_VL) -> Result:
    """Loss, logits, gradients, tokens of HF's Qwen3-VL."""
    stored, config, made_with = read_case(file)
    folder = machine.folder / f"golden-{file.stem}-{dtype}"
    folder.mkdir()
    parts: dict[str, Arrays] = {"in": {}, "grad": {}, "": {}}
    for name, array in stored.items():
        kind, _, rest = name.partition(".")
        parts[kind if kind in parts else ""][rest if kind in parts else name] = array
    batch, of_result = parts["in"], ("logits", "loss", "tokens")
    weights = {name: array for name, array in parts[""].items() if name not in of_result}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(config, encoding="utf-8")
    model = family_of_folder(folder).recipe_class().model_class.from_pretrained(folder, dtype)
    output = model(**batch)
    output.loss.backward()
    real = batch["attention_mask"].astype(bool)
    found = _with_gradients({"loss": output.loss}, model) | {
        "logits": as_array(output.logits)[real]
    }
    wanted = {f"gradient of {name}": array for name, array in parts["grad"].items()}
    wanted |= {"loss": stored["loss"], "logits": stored["logits"][real]}
    result = _compared(found, wanted, "HF's", _bound(machine, dtype), made_with=made_with)
    if dtype == "bfloat16" or machine.device != "cpu" or result.status == "wrong":
        return result
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
        return wrong(text, _OTHER_NUMBERS, **result.figures)
    return result


@check("golden.qwen3_vl_bfloat16", need="bfloat16")
def golden_qwen3_vl_bfloat16(machine: Machine) -> Result:
    """The same in bfloat16."""
    return golden_qwen3_vl(machine, "bfloat16")


@check("golden.qwen3_5")
def golden_qwen3_5(machine: Machine, dtype: Dtype = "float32") -> Result:
    """The same of HF's Qwen3.5."""
    return golden_qwen3_vl(machine, dtype, QWEN3_5)


@check("golden.qwen3_5_bfloat16", need="bfloat16")
def golden_qwen3_5_bfloat16(machine: Machine) -> Result:
    """That in bfloat16."""
    return golden_qwen3_5(machine, "bfloat16")


def read_case(file: Path) -> tuple[Arrays, str, str]:
    """Arrays, config.json and versions of a stored case."""
    with safe_open(file, "numpy") as stored:
        metadata = stored.metadata()
        arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    return arrays, metadata["config"], metadata["made_with"]


@check("golden.pi07")
def golden_pi07(machine: Machine) -> Result:
    """Losses and gradients of a pi07 policy, against plain operations on the host."""
    with on_host(), use_kernels("plain"):
        model = tiny_pi07()
        wanted = pi07_values(model)
    placed = tiny_pi07()
    for own, parameter in zip(placed.parameters(), model.parameters(), strict=True):
        own.set_value(parameter.numpy())
    return _compared(pi07_values(placed), wanted, "the host's", _bound(machine, "float32"))


def pi07_values(model: Any) -> Arrays:
    """Losses of a tiny policy, and every gradient."""
    losses = model(tiny_pi07_batch(2))
    (losses["MSE"] + losses["CE"]).backward()
    return _with_gradients({name: losses[name] for name in ("MSE", "CE")}, model)


def _with_gradients(losses: Mapping[str, Tensor], model: Any) -> Arrays:
    found = {name: as_array(loss).reshape([1]) for name, loss in losses.items()}
    gradients = gather_gradients([model]).items()
    return found | {f"gradient of {name}": array for name, array in gradients}


def _bound(machine: Machine, dtype: str) -> float:
    """Bound relative to the largest entry: TF32 keeps 10 bits, bfloat16 7, through all layers."""
    if dtype == "bfloat16":
        return 1e-1
    return 1e-2 if uses_tf32() else 2e-5 if machine.device == "cpu" else 1e-4


def _compared(found: Arrays, wanted: Arrays, whose: str, bound: float, **facts: Any) -> Result:
    worst = differences(found, wanted, NEGLIGIBLE, 1e-12)[0]
    losses = {name: float(array[0]) for name, array in found.items() if array.shape == (1,)}
    figures = {**facts, **losses, "error": worst.error, "in": worst.name, "bound": bound}
    if not worst.error <= bound:
        text = f"differs from {whose} by {worst.error:.2g} of its largest entry: {worst.text}"
        return wrong(f"{text} (bound {bound:.0e})", _OTHER_NUMBERS, **figures)
    told = ", ".join(f"{name} {value:.6f}" for name, value in losses.items())
    return ok(
        f"{told}, {len(wanted)} tensors within {worst.error:.1e} (bound {bound:.0e})", **figures
    )


@check("simulated.qwen3_vl", limit_s=120.0)
def simulated_qwen3_vl(machine: Machine, build: Any = tiny_qwen3_vl) -> Result:
    """A tiny Qwen3-VL over simulated ranks equals one device."""
    batch = tiny_qwen3_vl_batch()
    models = {"dense": build, "experts": partial(build, **EXPERTS)}
    return _simulated(machine, models, lambda model: model(**batch))


@check("simulated.qwen3_5", limit_s=120.0)
def simulated_qwen3_5(machine: Machine) -> Result:
    """A tiny Qwen3.5 over simulated ranks equals one device."""
    batch = tiny_qwen3_vl_batch()
    return _simulated(machine, {"dense": tiny_qwen3_5}, lambda model: model(**batch))


@check("simulated.pi07", limit_s=120.0, is_quick=False)
def simulated_pi07(machine: Machine) -> Result:
    """A tiny pi07 policy over simulated ranks equals one device."""
    batch = tiny_pi07_batch()

    def loss(model: Any) -> Tensor:
        losses = model(batch)
        return losses["MSE"] + losses["CE"]

    return _simulated(machine, {"policy": tiny_pi07}, loss)


def _simulated(machine: Machine, models: Mapping[str, Any], step: Any) -> Result:
    # TF32 rounds products of other shapes differently; a GPU adds in another order.
    tolerance = 5e-3 if uses_tf32() else 1e-5 if machine.device == "cpu" else 1e-4
    table = []
    degrees = (2,) if machine.is_quick else (2, 4)
    for (name, build), degree, rows in product(models.items(), degrees, (False, True)):
        table.append({"model": name, "mp_degree": degree, "sequence_parallel": rows})
        try:
            assert_equals_single_device(
                build, step, degree, sequence_parallel=rows, tolerance=tolerance
            )
        except AssertionError as error:
            return wrong(
                str(error)[:400],
                "tensor parallelism computes other numbers here than one device: run kernels and "
                "attention.backends to see which operation does",
                table=table,
            )
    return ok(f"{len(table)} cases equal one device within {tolerance:g}", table=table)


@check("generation.float32")
def generation(machine: Machine, dtype: Dtype = "float32") -> Result:
    """Cached tokens equal uncached ones, batches of 1 and 2, with keys and with states."""
    table = []
    for build, size in product((tiny_qwen3_vl, tiny_qwen3_5), (1, 2)):
        model, batch = build(), _prompts(size)
        model.to(dtype=dtype)
        model.eval()
        cached = model.generate(**batch, max_new_tokens=_TOKENS, do_sample=False)
        disagreement, compared = _first_disagreement(model, batch, cached, _GAP[dtype])
        table.append(
            {
                "model": build.__name__,
                "batch": size,
                "tokens": cached.tolist(),
                "compared": compared,
            }
        )
        if disagreement is not None:
            return wrong(
                f"{type(model).__name__}, batch of {size} in {dtype}: {disagreement}",
                "the cache or attention of a single query is wrong here: run "
                "kernels.causal_attention and attention.backends",
                table=table,
            )
    number = sum(row["compared"] for row in table)
    return ok(f"{number} tokens equal those without a cache", table=table)


@check("generation.bfloat16", need="bfloat16")
def generation_bfloat16(machine: Machine) -> Result:
    """The same in bfloat16, through flash attention."""
    return generation(machine, "bfloat16")


def _prompts(size: int) -> Arrays:
    """Prompts of a picture and text, padded on the left: the second one is shorter."""
    rows = [(1, Image(4, 4), 5, 6, 7), (Image(2, 4), 9)][:size]
    batch = tiny_qwen3_vl_batch(*rows, pad_to_multiple_of=1)
    del batch["labels"]
    # Real tokens to the right end.
    shifts = (batch["attention_mask"] == 0).sum(axis=1)
    for name in ("input_ids", "attention_mask"):
        batch[name] = np.stack([np.roll(*pair) for pair in zip(batch[name], shifts, strict=True)])
    return batch


def _first_disagreement(
    model: Any, batch: Arrays, cached_BN: np.ndarray, gap: float
) -> tuple[str | None, int]:
    """The first token that the whole sequence, without a cache, contradicts; and how many were
    compared. Tokens whose two best logits are within the gap are not."""
    prompt = batch["input_ids"].shape[1]
    added = {"input_ids": cached_BN, "attention_mask": np.ones_like(cached_BN)}
    whole = batch | {name: np.hstack([batch[name], ids]) for name, ids in added.items()}
    with paddle.no_grad():
        logits_BNV = as_array(model(**whole).logits)[:, prompt - 1 : -1]
    if not np.isfinite(logits_BNV).all():
        return "logits are not finite", 0
    second_BN, best_BN = np.moveaxis(np.sort(logits_BNV)[..., -2:], -1, 0)
    is_clear_BN = best_BN - second_BN > gap
    plain_BN = logits_BNV.argmax(axis=-1)
    for row, n in np.argwhere(is_clear_BN & (plain_BN != cached_BN)):
        return (
            f"token {n} of prompt {row} is {cached_BN[row, n]} with the cache and "
            f"{plain_BN[row, n]} without"
        ), int(is_clear_BN.sum())
    return None, int(is_clear_BN.sum())


@check("precision.loss_curve", limit_s=180.0, is_quick=False)
def loss_curve(machine: Machine) -> Result:
    """Steps in bfloat16 learn as in float32."""
    how = "bfloat16" if machine.has_bfloat16 else "bfloat16 (rounded float32, for want of kernels)"
    with nullcontext() if machine.has_bfloat16 else emulated_bfloat16():
        wide, narrow = losses("float32", _CURVE_STEPS), losses("bfloat16", _CURVE_STEPS)
    return curve_result(wide, narrow, how)


def losses(dtype: Dtype, steps: int) -> list[float]:
    """The loss of each step of a tiny Qwen3-VL with float32 master weights, on one batch."""
    model, batch = tiny_qwen3_vl(), tiny_qwen3_vl_batch()
    model.to(dtype=dtype)
    masters = MasterWeights(model.parameters())
    train = TrainConfig(output_dir="unused", learning_rate=_RATE)
    optimizer, found = Optimizer(list(model.named_parameters()), train, set(), masters), []
    for _ in range(steps):
        masters.begin_step(1)
        loss = model(**batch).loss
        loss.backward()
        masters.end_micro_batch()
        masters.end_backward()
        optimizer.step(_RATE)
        optimizer.clear_gradients()
        masters.all_gather_parameters()
        found.append(float(loss))
    return found


def curve_result(wide: Sequence[float], narrow: Sequence[float], how: str) -> Result:
    """The result of the losses in float32, and in what `how` names."""
    apart = np.abs(np.subtract(wide, narrow))
    # NaN counts as the largest.
    step, learnt = int(np.argmax(apart)), wide[0] - wide[-1]
    share = float(apart[step] / learnt)
    figures = {"float32": list(wide), "compared": list(narrow), "of": how, "share": share}
    text = (
        f"{len(wide)} steps in {how} and in float32: from {wide[0]:.3f} to {narrow[-1]:.3f} and "
        f"{wide[-1]:.3f}, at most {100 * share:.1f} % of the fall apart"
    )
    if learnt > 0 and share <= _CURVE_BOUND:
        return ok(text, **figures)
    return wrong(
        f"{text}, in step {step + 1} (bound {100 * _CURVE_BOUND:.0f} %)",
        "a run in bfloat16 learns less here: run kernels, attention and golden to see which "
        "operation differs, and train with model.compute_dtype float32 until it is found",
        **figures,
    )


@check("saving.resume", limit_s=120.0)
def resumed_run(machine: Machine) -> Result:
    """A resumed run equals an uninterrupted one."""
    folder = machine.folder / "resume"
    run = write_tiny_run(folder, _RUN_STEPS)
    whole, resumed = folder / "whole", folder / "resumed"
    settings = [f"train.save_steps={_SAVED}", "train.resume_from_checkpoint=auto"]
    before = existing_flags(_DETERMINISTIC)
    paddle.set_flags(dict.fromkeys(before, 1))
    try:
        for output in (whole, resumed):
            if output == resumed:
                name = f"checkpoint-{_SAVED}"
                shutil.copytree(whole / name, resumed / name)
            overrides = [f"train.output_dir={output}", *settings]
            build_trainer(load_run_config(run, overrides)).run()
    finally:
        paddle.set_flags(before)
    number, differing = compared_bits(
        *(output / f"checkpoint-{_RUN_STEPS}" for output in (resumed, whole))
    )
    if differing:
        return wrong(
            f"{len(differing)} of {number} tensors differ after a resume, first {differing[0]}",
            "a checkpoint does not hold the whole state, or kernels add in a changing order: run "
            "twice to tell these apart, and report it",
            differing=differing[:20],
        )
    return ok(f"{number} tensors of model and optimizer are equal to the bit")


def compared_bits(found: Path, wanted: Path) -> tuple[int, list[str]]:
    """Number of tensors of two checkpoints, and the names of those that are not the same bits."""
    own, other = read_checkpoint(found), read_checkpoint(wanted)
    equal = {
        name
        for name in own.keys() & other.keys()
        if np.array_equal(own[name], other[name], equal_nan=True)
    }
    return len(other), sorted({*own, *other} - equal)


def read_checkpoint(folder: Path) -> Arrays:
    """Tensors of model and optimizer of a checkpoint."""
    headers = [read_checkpoint_headers(folder, part) for part in ("model", "optimizer")]
    return {name: tensor.read() for part in headers for name, tensor in part.items()}
