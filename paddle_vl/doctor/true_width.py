"""Training steps of a slice of a real model at its true width, extrapolated to the whole model.

Two slices are trained: of one decoder layer and one vision block, and of three of each. What the
second adds, per operation of the model's FLOP counter, is what further layers add; so

    step time of the whole = time(3) + (flops(whole) - flops(3)) * (time(3) - time(1))
                                       / (flops(3) - flops(1))

Embedding, head and the fixed part of a step are in time(3). The memory between steps is compared
with the formula of `paddle_vl.train.memory_needed`.
"""

import gc
import time
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import paddle
import yaml
from paddle import Tensor
from paddle.base import core

from paddle_vl.config.load import load_run_config
from paddle_vl.doctor.check import Machine, Result, check, ok, wrong
from paddle_vl.doctor.environment import best_s
from paddle_vl.parallel.bandwidth import synchronize
from paddle_vl.profile.memory import GB
from paddle_vl.profile.workload import Workload, with_workload
from paddle_vl.testing import tiny_qwen3_vl, tiny_qwen3_vl_config
from paddle_vl.testing.qwen3_vl import EIGHTH, sliced_values
from paddle_vl.testing.tiny_run import write_processor
from paddle_vl.train.build import build_trainer, run_family
from paddle_vl.train.memory_needed import NeededMemory, available_memory
from paddle_vl.train.reporting.device_peaks import known_peak
from paddle_vl.train.trainer import Trainer

_SLICES = (1, 3)
_WARM_UP, _STEPS = 2, 5
# Memory between steps may differ from the formula by this share, and by these bytes of buffers.
_SHARE, _BUFFERS = 0.1, 128e6


class Size(NamedTuple):
    """A model, and samples to train it on.

    Attributes:
        name: see `sliced_values`.
        needs_gb: device memory for two layers with optimizer state.
        image_side: pixels of a sample's image.
        answer_tokens: tokens of a sample's answer.
    """

    name: str
    needs_gb: float
    image_side: int
    answer_tokens: int
    dtype: str = "bfloat16"


# The first that fits is taken.
SIZES = (
    Size("Qwen3-VL-8B", 45, 1024, 3000),
    Size("Qwen3-VL-4B", 20, 1024, 3000),
    Size("Qwen3-VL-2B", 12, 768, 1000),
)
SMALL = Size(EIGHTH, 1, 256, 128, "float32")


class SliceMeasure(NamedTuple):
    """Measured steps of a slice.

    Attributes:
        flops, tokens: of a step.
        state: bytes that stay between steps.
        needed: the formula's.
        whole_flops: of a step of the whole model.
    """

    seconds: float
    flops: int
    tokens: float
    state: int
    needed: NeededMemory
    whole_flops: int


@check("speed.true_width", limit_s=180.0, is_quick=False)
def true_width(machine: Machine) -> Result:
    """Five steps of layers of a real size, extrapolated to the whole model."""
    size, peak = SMALL, None
    if machine.has_bfloat16:
        have = available_memory()[0] / GB
        size = next((size for size in SIZES if size.needs_gb <= have), SMALL)
    small, large = (_measured(machine.folder, size, number) for number in _SLICES)
    # Without storage: shapes alone.
    whole = type(tiny_qwen3_vl()).from_config(_config(size), materialize=False)
    parameters = sum(prod(parameter.shape) for parameter in whole.parameters())
    # Weight and gradient in the dtype, two float32 moments, and a float32 master weight.
    whole_state = parameters * (2 + 2 + 8 + 4 if size.dtype == "bfloat16" else 4 + 4 + 8)
    # The peak of the data sheet; that of a large product where none is known.
    if machine.device == "gpu":
        peak = known_peak(paddle.device.cuda.get_device_name(), size.dtype)
    if peak is None:
        side = 4096 if machine.device == "gpu" else 1024
        x = paddle.ones([side, side]).astype(size.dtype)
        peak = 2 * side**3 / best_s(lambda: paddle.matmul(x, x))
    return slices_result(size, small, large, peak, whole_state)


def _config(size: Size) -> Any:
    return type(tiny_qwen3_vl_config()).from_dict(sliced_values(size.name))


def slices_result(
    size: Size, small: SliceMeasure, large: SliceMeasure, peak: float, whole_state: float
) -> Result:
    """Figures of the slices and the whole model; memory far from the formula is a finding.

    Args:
        peak: FLOP/s of the device's products.
        whole_state: bytes of weights, gradients and optimizer state of the whole model.
    """
    added, left = large.flops - small.flops, large.whole_flops - large.flops
    # On a busy machine more layers may seem to take no longer; then every operation counts alike.
    is_noisy = large.seconds <= small.seconds
    per_flop = large.seconds / large.flops if is_noisy else (large.seconds - small.seconds) / added
    whole_s = large.seconds + left * per_flop
    formula = large.needed.weights + large.needed.optimizer
    figures = {
        "model": size.name,
        "dtype": size.dtype,
        "step_s": [small.seconds, large.seconds],
        "is_noisy": is_noisy,
        "tokens": large.tokens,
        "peak_tflop_per_s": peak / 1e12,
        "slice_mfu": large.flops / large.seconds / peak,
        "whole_step_s": whole_s,
        "whole_tokens_per_s": large.tokens / whole_s,
        "whole_mfu": large.whole_flops / whole_s / peak,
        "state_gb": large.state / GB,
        "formula_gb": formula / GB,
        "whole_state_gb": whole_state / GB,
    }
    text = (
        f"{size.name}, {size.dtype}: {_SLICES[1]} layers {1e3 * large.seconds:.1f} ms a step, MFU "
        f"{100 * figures['slice_mfu']:.0f} %; whole model (estimate{', noisy' * is_noisy}) "
        f"{figures['whole_tokens_per_s']:.0f} tokens/s, MFU {100 * figures['whole_mfu']:.0f} %, "
        f"{whole_state / GB:.1f} GB of state over its ranks; state of the slice "
        f"{large.state / GB:.2f} GB, formula {formula / GB:.2f} GB"
    )
    # Gradients may stay or be freed between steps.
    least, most = (1 - _SHARE) * formula, (1 + _SHARE) * large.needed.total + _BUFFERS
    if not least <= large.state <= most:
        return wrong(
            text,
            "memory between steps is not what the formula says: leave more room than the tables "
            "of docs/sharding.md ask for, and report it",
            **figures,
        )
    return ok(text, **figures)


def _measured(root: Path, size: Size, number: int) -> SliceMeasure:
    folder = root / f"slice{number}"
    folder.mkdir()
    write_processor(folder / "processor", "What is there to see? word", 16, size.image_side**2)
    settings = {
        "model": {"config": sliced_values(size.name, number), "compute_dtype": size.dtype},
        "data": {"train": ["none"], "processor": str(folder / "processor"), "max_length": 8192},
        "train": {
            "output_dir": str(folder / "out"),
            "max_steps": 100,
            "per_device_train_batch_size": 1,
            "learning_rate": 1e-5,
        },
        # Makes the trainer count operations; the value is not used.
        "logging": {"progress_bar": False, "device_peak_tflops": 1.0},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    workload = Workload(True, 1, size.image_side, size.answer_tokens)
    config = with_workload(load_run_config(file), workload, folder)
    before = _allocated_bytes()
    trainer = build_trainer(config, writes=False)
    try:
        for _ in range(_WARM_UP):
            trainer.train_one_step()
        seconds, tokens = _timed(trainer)
        state = _allocated_bytes() - before
        model = trainer.runner.model
        (micro_batch,) = trainer.feed.next_step().micro_batches
    finally:
        trainer.feed.close()
    # The family's counter, for another configuration.
    make_counter: Any = type(run_family(config).flop_counter(model, set(model.whole_shapes())))
    batch = {
        name: value.numpy() if isinstance(value, Tensor) else value
        for name, value in micro_batch.batch.items()
    }
    needed = NeededMemory.of(model.parameters(), config.parallel)
    whole_flops = make_counter(_config(size))(batch)
    return SliceMeasure(seconds, micro_batch.flops, tokens, state, needed, whole_flops)


def _timed(trainer: Trainer) -> tuple[float, float]:
    """Seconds and tokens of a steady step.

    A GPU is waited for once, after all steps, as in a run. A CPU's steps are apart, and the fastest
    was disturbed least.
    """
    times = []
    synchronize()
    for _ in range(_STEPS):
        begin = time.perf_counter()
        outcome = trainer.train_one_step()
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    synchronize()
    left = time.perf_counter() - begin
    if not bool(outcome.is_good):
        raise RuntimeError("a step was skipped: its loss or gradient norm is not finite")
    is_cpu = paddle.get_device().startswith("cpu")
    return min(times) if is_cpu else (sum(times) + left) / _STEPS, outcome.totals.num_tokens


def _allocated_bytes() -> int:
    """Bytes of all tensors on this process's device."""
    gc.collect()
    if paddle.get_device().startswith("cpu"):
        return core.host_memory_stat_current_value("Allocated", 0)
    return paddle.device.cuda.memory_allocated()
