"""Profile of one configuration: measured steps of the run's own trainer on every rank."""

import json
import logging
import os
import time
from dataclasses import asdict
from typing import Any

import numpy as np
import paddle

from paddle_vl.config.parallel_settings import ParallelConfig
from paddle_vl.config.schema import RunConfig
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.processes import MemoryLimitError
from paddle_vl.profile.cell_runs import reported_errors
from paddle_vl.profile.cells import RESULT_FILE
from paddle_vl.profile.memory import GB, MemoryMeter, device_memory_limit
from paddle_vl.profile.summary import RankMeasure, profile_table, summarize
from paddle_vl.profile.workload import ProfileSettings, with_workload
from paddle_vl.train.allocator import allocator_flags
from paddle_vl.train.build import build_trainer
from paddle_vl.train.phases import PhaseClock
from paddle_vl.train.trainer import Trainer

logger = logging.getLogger(__name__)


def run_profile(config: RunConfig, settings: ProfileSettings) -> dict[str, Any]:
    """Profile training as the configuration says. Called by all ranks of the run together.

    Rank 0 writes profile.json and prints the table. The run's own output is neither read nor
    written.

    Returns:
        The result, see `paddle_vl.profile.summary.summarize`, the same on every rank.

    Raises:
        ValueError, RuntimeError: as `paddle_vl.train.build.build_trainer`.
        MemoryLimitError: this rank is above the limit.
    """
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    settings.out.mkdir(parents=True, exist_ok=True)
    with reported_errors(settings.out, rank):
        config = with_workload(profiled_config(config, settings), settings.workload, settings.out)
        trainer = build_trainer(config, writes=False, updates=settings.updates)
        limit = settings.memory_limit_gb
        meter = MemoryMeter()
        try:
            measured = measure(
                trainer,
                meter,
                rank=rank,
                warmup_steps=settings.warmup_steps,
                steps=settings.steps,
                memory_limit=None if limit is None else int(limit * GB),
            )
        finally:
            trainer.feed.close()
        everyone = trainer.ranks.gathered(asdict(measured))
        measures = [RankMeasure(**of_rank) for of_rank in everyone]
        result = summarize(measures, _facts(config, settings, trainer))
        if trainer.ranks.is_main:
            print(profile_table(result))
            for file in filter(None, (settings.out / RESULT_FILE, settings.copy)):
                file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                print(f"written to {file}", flush=True)
    return result


def measure(
    trainer: Trainer,
    meter: MemoryMeter,
    *,
    rank: int,
    warmup_steps: int,
    steps: int,
    memory_limit: int | None = None,
) -> RankMeasure:
    """Run the trainer's next steps and measure those after the warm-up. Called by all ranks.

    The peak of memory is reset after the warm-up. If a rank is above the limit, all ranks stop
    after the step.

    Raises:
        MemoryLimitError: on the ranks above the limit, and on the others a RuntimeError.
    """
    clock, ranks = PhaseClock(), trainer.ranks
    outcomes, cpu_seconds = [], []
    for _ in range(warmup_steps):
        trainer.train_one_step()
        _check_limit(meter, memory_limit, rank, ranks)
    ranks.wait()
    meter.reset()
    for _ in range(steps):
        begin = time.process_time()
        with clock.step():
            outcomes.append(trainer.train_one_step())
        cpu_seconds.append(time.process_time() - begin)
        _check_limit(meter, memory_limit, rank, ranks)
    peak = meter.peak()
    return RankMeasure(
        rank=rank,
        steps=[{name.value: value for name, value in step.items()} for step in clock.steps],
        cpu_seconds=cpu_seconds,
        samples=[outcome.totals.num_samples for outcome in outcomes],
        tokens=[outcome.totals.num_tokens for outcome in outcomes],
        allocated=peak.allocated,
        reserved=peak.reserved,
        memory_source=meter.source,
    )


def _check_limit(meter: MemoryMeter, limit: int | None, rank: int, ranks: SingleRank) -> None:
    if limit is None:
        return
    used = meter.peak().reserved
    is_over = used > limit
    if not int(ranks.sum_over_all(paddle.to_tensor(int(is_over)))):
        return
    if is_over:
        raise MemoryLimitError(rank, used, limit)
    raise RuntimeError(f"rank {rank} stops: another rank is above the limit of memory")


def profiled_config(config: RunConfig, settings: ProfileSettings) -> RunConfig:
    """The run's configuration for the profiled steps, without evaluation and checkpoints."""
    values = config.model_dump()
    steps = settings.warmup_steps + settings.steps
    values["train"] |= {
        # Never created, as a profile saves nothing.
        "output_dir": str(settings.out / "run"),
        "max_steps": steps,
        "num_train_epochs": None,
        "max_tokens": None,
        "warmup_steps": min(config.train.warmup_steps, steps),
        "eval_steps": None,
        "save_steps": None,
        "resume_from_checkpoint": "none",
    }
    values["data"]["eval"] = []
    values["logging"] |= {"progress_bar": False, "report_to": []}
    return type(config).model_validate(values)


def sharding_choice(parallel: ParallelConfig) -> str:
    """How data-parallel ranks share the training state, in words."""
    parts = []
    if parallel.dp_degree > 1:
        parts.append("dp")
    if parallel.sharding_degree > 1:
        parts.append(f"sharding stage {parallel.sharding_stage}")
    return " with ".join(parts) or "none"


def _facts(config: RunConfig, settings: ProfileSettings, trainer: Trainer) -> dict[str, Any]:
    model, limit = trainer.runner.model, settings.memory_limit_gb
    if limit is None and (device_limit := device_memory_limit()) is not None:
        limit = device_limit / GB
    parallel, train, data = config.parallel, config.train, config.data
    recomputes = getattr(model.config, "gradient_checkpointing", False)
    degrees = {
        axis: getattr(parallel, f"{axis}_degree", 1)
        for axis in ("dp", "mp", "pp", "sharding", "ep")
    }
    return {
        "model_type": type(model).__name__,
        "num_parameters": sum(int(np.prod(shape)) for shape in model.whole_shapes().values()),
        "distributed_type": sharding_choice(parallel),
        "topology": " ".join(f"{axis}{n}" for axis, n in degrees.items() if n > 1) or "1 process",
        "sharding_stage": parallel.sharding_stage if parallel.sharding_degree > 1 else None,
        # A policy has both in its own configuration too.
        "recompute": "full" if recomputes and train.recompute == "none" else train.recompute,
        "attention_implementation": getattr(model.config, "attention_implementation", None),
        **({} if settings.updates else {"updates": "none"}),
        "compute_dtype": config.model.compute_dtype,
        "batch_size": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "num_workers": data.num_workers,
        "prefetch_factor": data.prefetch_batches,
        "cameras": settings.workload.cameras,
        "data_source": "synthetic" if settings.workload.is_synthetic else "the run's own",
        "device": paddle.get_device(),
        "paddle": paddle.__version__,
        "allocator_flags": allocator_flags(),
        "warmup": settings.warmup_steps,
        "memory_limit_gb": limit,
        "config": config.model_dump(),
    }
