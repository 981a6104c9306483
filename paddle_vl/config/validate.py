"""Rules between several settings, or between a setting and the machine.

A rule is a function that yields a message for each problem that it finds. `CONFIG_RULES` need the
settings alone and run when a file is loaded; `LAUNCH_RULES` look at files and device before
anything is built. Families add rules in their subclass of `RunConfig`. Rules about the mesh of
ranks are in `paddle_vl.parallel.degrees`.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from paddle_vl.config.data_sources import SourceConfig, matches
from paddle_vl.config.parallel_settings import EncoderConfig
from paddle_vl.config.schedule_rules import SCHEDULE_RULES
from paddle_vl.config.schema import RunConfig

Problems = Iterator[str]
# Measured memory of a worker process before its first sample.
_WORKER_BYTES = 20_000_000
_RUN_FILES = re.compile(r"checkpoint-\d+|final|metrics\.jsonl")
# cgroup versions 2 and 1; a container sees its own limit.
_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def rule_problems(config: RunConfig) -> list[str]:
    """Problems of the settings alone."""
    return [*(problem for rule in CONFIG_RULES for problem in rule(config)), *config.problems()]


def launch_problems(config: RunConfig, device: str) -> list[str]:
    """What prevents the run from starting on this machine, on the Paddle device of that name."""
    return [problem for rule in LAUNCH_RULES for problem in rule(config, device)]


def one_model_source(config: RunConfig) -> Problems:
    model = config.model
    if (model.pretrained is None) == (model.config is None):
        found = "neither is" if model.pretrained is None else "both are"
        yield (
            f"{found} set of model.pretrained and model.config: set model.pretrained to start from "
            "a checkpoint, or model.config to start from random weights"
        )


def processor_is_known(config: RunConfig) -> Problems:
    has_folder = config.data.processor is not None or config.model.pretrained is not None
    if config.needs_processor and not has_folder:
        yield (
            "data.processor is not set and there is no model.pretrained to take it from: set "
            "data.processor to a folder with tokenizer.json and preprocessor_config.json"
        )


def evaluation_has_data(config: RunConfig) -> Problems:
    if config.train.eval_steps is not None and not config.data.eval:
        yield (
            f"train.eval_steps is {config.train.eval_steps} but data.eval lists no file: name the "
            "evaluation files or remove train.eval_steps"
        )


def part_rates_have_a_schedule(config: RunConfig) -> Problems:
    if config.train.part_learning_rates and config.train.learning_rate == 0:
        yield (
            "train.part_learning_rates are peaks of the schedule of train.learning_rate, which is "
            "0: set it above 0, and freeze (model.freeze) what is not to be trained"
        )


def sharding_settings_have_an_effect(config: RunConfig) -> Problems:
    parallel = config.parallel
    stage = parallel.sharding_stage if parallel.sharding_degree > 1 else 0
    found = f"parallel.sharding_stage is {stage}" if stage else "parallel.sharding_degree is 1"
    if parallel.sharding_gather_overlap and stage != 1:
        yield (
            f"parallel.sharding_gather_overlap is true but {found}: it applies to stage 1; set "
            "parallel.sharding_degree above 1 and sharding_stage=1, or remove it"
        )
    if not parallel.reshard_after_forward and stage != 3:
        yield (
            f"parallel.reshard_after_forward is false but {found}: only stage 3 frees parameters "
            "after a forward pass; set parallel.sharding_stage=3, or remove it"
        )
    if parallel.reduce_once_per_step and stage != 2:
        yield (
            f"parallel.reduce_once_per_step is true but {found}: stage 1 reduces once in any case, "
            "and stage 3 has no unsharded gradients; set parallel.sharding_stage=2, or remove it"
        )
    if parallel.reduce_once_per_step and config.train.gradient_accumulation_steps == 1:
        yield (
            "parallel.reduce_once_per_step is true but train.gradient_accumulation_steps is 1, so "
            "every step reduces once: remove it, or set train.gradient_accumulation_steps above 1"
        )
    if parallel.reduce_dtype == "bfloat16":
        if stage < 2:
            yield (
                f"parallel.reduce_dtype is bfloat16 but {found}: it applies to stages 2 and 3; set "
                "parallel.sharding_stage=2, or remove it"
            )
        if config.model.compute_dtype != "bfloat16":
            yield (
                f"parallel.reduce_dtype is bfloat16 but model.compute_dtype is "
                f"{config.model.compute_dtype}, whose gradients it would round: set "
                "model.compute_dtype=bfloat16, or remove it"
            )


def colocated_has_an_encoder(config: RunConfig) -> Problems:
    parallel = config.parallel
    if parallel.schedule == "colocated" and not config.has_colocated:
        yield (
            f"parallel.schedule is colocated, which {config.family} does not support yet: set "
            "parallel.schedule=plain"
        )
    if parallel.schedule == "colocated" and parallel.vision == "replicate":
        yield (
            "parallel.vision is replicate but parallel.schedule is colocated, where "
            "parallel.encoder divides the encoder's work: remove parallel.vision"
        )
    defaults = EncoderConfig()
    given = [
        f"parallel.encoder.{name} {value}"
        for name, value in parallel.encoder
        if value != getattr(defaults, name)
    ]
    if parallel.schedule == "plain" and given:
        yield (
            f"{', '.join(given)}: without effect while parallel.schedule is plain, where the "
            "encoder is part of the first pipeline stage; set parallel.schedule=colocated, or "
            "remove it"
        )


def dtype_runs_on_device(config: RunConfig, device: str) -> Problems:
    if config.model.compute_dtype == "bfloat16" and device.startswith("cpu"):
        yield (
            "model.compute_dtype is bfloat16 but the device is the CPU, where Paddle has no "
            "bfloat16 kernels: set model.compute_dtype=float32 or run on a GPU"
        )


def files_exist(config: RunConfig, device: str) -> Problems:
    model, data = config.model, config.data
    files: dict[str, str] = {}
    for setting in ("train", "eval"):
        for i, entry in enumerate(getattr(data, setting)):
            if isinstance(entry, SourceConfig):
                yield from _absent_sources(f"data.{setting}[{i}].path", entry)
            else:
                files[f"data.{setting}[{i}]"] = entry
    files |= config.input_files
    # Without the suffix it is the name of a published size.
    if isinstance(model.config, str) and model.config.endswith(".json"):
        files["model.config"] = model.config
    folders = {"model.pretrained": model.pretrained, "data.processor": data.processor}
    for name, file in files.items():
        if not Path(file).is_file():
            yield _absent(name, file, "file")
    for name, folder in folders.items():
        if folder is not None and not Path(folder).is_dir():
            yield _absent(name, folder, "folder")


def output_can_be_written(config: RunConfig, device: str) -> Problems:
    output = Path(config.train.output_dir)
    nearest = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not nearest.is_dir():
        yield f"train.output_dir {output}: {nearest} is a file, not a folder; choose another folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield (
            f"train.output_dir {output}: this user may not write to {nearest}; choose another "
            "folder, or change its permissions"
        )


def workers_fit(config: RunConfig, device: str) -> Problems:
    workers = config.data.num_workers
    needed, available = workers * _WORKER_BYTES, machine_memory()
    if needed > available:
        yield (
            f"data.num_workers {workers} would take {needed / 1e9:.0f} GB on each rank before any "
            f"sample, and this machine has {available / 1e9:.0f} GB: a few for each of its "
            f"{os.cpu_count()} cores are enough"
        )


def output_is_unused(config: RunConfig, device: str) -> Problems:
    output = Path(config.train.output_dir)
    if config.train.resume_from_checkpoint != "none" or not output.is_dir():
        return
    found = sorted(path.name for path in output.iterdir() if _RUN_FILES.fullmatch(path.name))
    if found:
        yield (
            f"train.output_dir {output} already holds a run ({', '.join(found)}): continue it with "
            "train.resume_from_checkpoint=auto, or choose another folder"
        )


def machine_memory() -> int:
    """Bytes of memory and swap that the processes of this machine or container may use."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if " kB" in line}
    swap = sizes.get("SwapTotal", 0)
    total = sizes["MemTotal"] + swap
    for file in map(Path, _CGROUP_LIMITS):
        if file.is_file() and (text := file.read_text(encoding="ascii").strip()).isdigit():
            total = min(total, int(text) + swap)
    return total


def _absent_sources(setting: str, source: SourceConfig) -> Problems:
    for pattern in source.patterns:
        if not matches(pattern):
            yield _absent(setting, pattern, "file")


def _absent(setting: str, path: str, kind: str) -> str:
    return (
        f"{setting}: no {kind} {path} (paths are relative to the current directory, {Path.cwd()})"
    )


CONFIG_RULES = (
    one_model_source,
    processor_is_known,
    *SCHEDULE_RULES,
    evaluation_has_data,
    part_rates_have_a_schedule,
    sharding_settings_have_an_effect,
    colocated_has_an_encoder,
)
LAUNCH_RULES = (
    dtype_runs_on_device,
    files_exist,
    workers_fit,
    output_can_be_written,
    output_is_unused,
)
