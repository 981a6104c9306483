"""Rules between several settings, or between a setting and the machine.

That a setting needs another is said where it is declared, see `paddle_vl.config.section.OnlyWith`.
Other rules are functions that yield a message for each problem. `CONFIG_RULES` need the
settings alone and run when a file is loaded; `LAUNCH_RULES` look at files and device before
anything is built. Families add rules in their subclass of `RunConfig`. Rules about the mesh of
ranks are in `paddle_vl.parallel.degrees`.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from paddle_vl.config.data_sources import SourceConfig, matches
from paddle_vl.config.patterns import misspelt_groups
from paddle_vl.config.schema import RunConfig, TrainConfig
from paddle_vl.config.section import settings_without_effect

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


def parts_are_spelt_right(config: RunConfig) -> Problems:
    model, train = config.model, config.train
    for setting, patterns in (
        ("model.freeze", model.freeze),
        ("train.part_learning_rates", train.part_learning_rates),
        ("train.weight_decay_exclude", train.weight_decay_exclude),
    ):
        yield from misspelt_groups(patterns, setting, config.parts)


def one_length(config: RunConfig) -> Problems:
    names = ("max_steps", "num_train_epochs", "max_tokens")
    given = [f"train.{name}" for name in names if getattr(config.train, name) is not None]
    if not given:
        yield (
            "no length is set: set one of train.max_steps, train.num_train_epochs and "
            "train.max_tokens"
        )
    elif len(given) > 1:
        yield f"{' and '.join(given)} are set, and a run has one length: set one of them"


def tokens_are_counted(config: RunConfig) -> Problems:
    train = config.train
    if train.max_tokens is None:
        return
    if not config.counts_tokens:
        yield (
            f"train.max_tokens is {train.max_tokens} but {config.family} counts no tokens: set "
            "train.max_steps or train.num_train_epochs"
        )
    if train.warmup_steps:
        yield (
            f"train.warmup_steps is {train.warmup_steps} but the learning rate of a run of "
            "train.max_tokens follows tokens: set train.warmup_ratio, the share of the run"
        )
    if train.lr_scheduler_type == "cosine_decay_with_warmup":
        yield (
            "train.lr_scheduler_type cosine_decay_with_warmup counts steps, and train.max_tokens "
            "is set: choose cosine, constant or warmup_stable_decay, or set train.max_steps"
        )


def warmup_fits(config: RunConfig) -> Problems:
    train = config.train
    if train.warmup_steps and train.warmup_ratio:
        yield (
            f"train.warmup_steps {train.warmup_steps} and train.warmup_ratio {train.warmup_ratio} "
            "are both set: set one of them"
        )
    if train.max_steps is not None:
        yield from warmup_problems(train, train.max_steps, f"train.max_steps {train.max_steps}")


def warmup_problems(train: TrainConfig, num_steps: int, length: str) -> Problems:
    """A warmup that runs into the decay in a run of `num_steps`; messages say `length`.

    A run that ends in its warmup, as short trials do, has none, and is told when it starts.
    """
    decay = math.ceil(num_steps * (train.decay_ratio or 0))
    if train.warmup_steps < num_steps < train.warmup_steps + decay:
        yield (
            f"train.warmup_steps {train.warmup_steps} and the {train.decay_ratio} of the run in "
            f"which the rate falls (train.decay_ratio) exceed {length}: lower one of them"
        )


def stable_phase_has_an_end(config: RunConfig) -> Problems:
    train = config.train
    if train.lr_scheduler_type != "warmup_stable_decay":
        return
    if train.decay_ratio is None:
        yield (
            "train.lr_scheduler_type is warmup_stable_decay but train.decay_ratio is not set: "
            "set the share of the run in which the rate falls, for instance 0.1"
        )
    elif (share := train.decay_ratio + train.warmup_ratio) > 1:
        yield (
            f"train.warmup_ratio {train.warmup_ratio} and train.decay_ratio "
            f"{train.decay_ratio} are {share:g} of the run: lower them to at most 1 together"
        )


def colocated_has_an_encoder(config: RunConfig) -> Problems:
    parallel = config.parallel
    if parallel.schedule == "colocated" and not config.has_colocated:
        yield (
            f"parallel.schedule is colocated, which {config.family} does not support yet: set "
            "parallel.schedule=plain"
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
    evaluation_has_data,
    part_rates_have_a_schedule,
    parts_are_spelt_right,
    one_length,
    tokens_are_counted,
    warmup_fits,
    stable_phase_has_an_end,
    colocated_has_an_encoder,
    settings_without_effect,
)
LAUNCH_RULES = (
    dtype_runs_on_device,
    files_exist,
    workers_fit,
    output_can_be_written,
    output_is_unused,
)
