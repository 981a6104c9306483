"""Tiny models: ranks against one device, generation, bfloat16, and a resumed run."""

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

from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.config.load import load_run_config
from paddle_vl.config.schema import TrainConfig
from paddle_vl.doctor.check import Machine, Result, check, ok, wrong
from paddle_vl.doctor.environment import existing_flags
from paddle_vl.doctor.measuring import uses_tf32
from paddle_vl.nn.examples import Dtype
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.testing import (
    Image,
    assert_equals_single_device,
    emulated_bfloat16,
    tiny_pi07,
    tiny_pi07_batch,
    tiny_qwen3_vl,
    tiny_qwen3_vl_batch,
)
from paddle_vl.testing.qwen3_vl import EXPERTS
from paddle_vl.testing.tensors import as_array
from paddle_vl.testing.tiny_run import write_tiny_run
from paddle_vl.train.build import build_trainer
from paddle_vl.train.optimizer import Optimizer

_TOKENS = 8
# Where the two best logits are closer than this, either may win.
_GAP = {"float32": 1e-3, "bfloat16": 1e-1}
_CURVE_STEPS, _RATE = 50, 1e-3
# Largest difference of two losses of one step, of what float32 has learnt in all steps.
_CURVE_BOUND = 0.05
_RUN_STEPS, _SAVED = 4, 2
# Without these a GPU adds in an order that changes from run to run.
_DETERMINISTIC = ("FLAGS_cudnn_deterministic", "FLAGS_embedding_deterministic")

Arrays = dict[str, np.ndarray]


@check("simulated.qwen3_vl", limit_s=120.0)
def simulated_qwen3_vl(machine: Machine, build: Any = tiny_qwen3_vl) -> Result:
    """A tiny Qwen3-VL over simulated ranks equals one device."""
    batch = tiny_qwen3_vl_batch()
    models = {"dense": build, "experts": partial(build, **EXPERTS)}
    return _simulated(machine, models, lambda model: model(**batch))


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
        case = {"model": name, "mp_degree": degree, "sequence_parallel": rows}
        try:
            ranks = assert_equals_single_device(
                build, step, degree, sequence_parallel=rows, tolerance=tolerance
            )
        except AssertionError as error:
            return wrong(
                str(error)[:400],
                "tensor parallelism computes other numbers here than one device: run kernels and "
                "attention.backends to see which operation does",
                table=[*table, case | {"differs": str(error)}],
            )
        table.append(case | {"collectives": len(ranks.collectives[0])})
    return ok(f"{len(table)} cases equal one device within {tolerance:g}", table=table)


@check("generation.float32")
def generation(machine: Machine, dtype: Dtype = "float32") -> Result:
    """Cached tokens equal uncached ones, batches of 1 and 2."""
    model = tiny_qwen3_vl()
    model.to(dtype=dtype)
    model.eval()
    table = []
    for size in (1, 2):
        batch = _prompts(size)
        cached = model.generate(**batch, max_new_tokens=_TOKENS, do_sample=False)
        disagreement, compared = _first_disagreement(model, batch, cached, _GAP[dtype])
        table.append({"batch": size, "tokens": cached.tolist(), "compared": compared})
        if disagreement is not None:
            return wrong(
                f"batch of {size} in {dtype}: {disagreement}",
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
    compared = 0
    for row, number in np.ndindex(*cached_BN.shape):
        logits_V, token = logits_BNV[row, number], int(cached_BN[row, number])
        if not np.isfinite(logits_V).all():
            return f"logits are not finite at token {number} of prompt {row}", compared
        second, best = np.sort(logits_V)[-2:]
        if best - second > gap:
            compared += 1
            if (other := int(logits_V.argmax())) != token:
                return (
                    f"token {number} of prompt {row} is {token} with the cache and {other} without",
                    compared,
                )
    return None, compared


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
    return ok(f"{number} tensors of model and optimizer are equal to the bit", tensors=number)


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
