"""Rules that several settings, or a setting and the machine, must satisfy together.

A rule is a function that yields a message for everything it finds wrong. `CONFIG_RULES` need the
settings alone and run when a file is loaded; `LAUNCH_RULES` look at the files and the device before
anything is built. What several processes must satisfy is in `paddle_vl.parallel.degrees`.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from paddle_vl.config.machine import machine_memory
from paddle_vl.config.schema import RunConfig

Problems = Iterator[str]
# What a worker has of its own before any sample; measured.
_WORKER_BYTES = 20_000_000
_RUN_FILES = re.compile(r"checkpoint-\d+|final|metrics\.jsonl")


def rule_problems(config: RunConfig) -> list[str]:
    """What is wrong with the settings themselves."""
    return [problem for rule in CONFIG_RULES for problem in rule(config)]


def launch_problems(config: RunConfig, device: str) -> list[str]:
    """What keeps this configuration from running here, on Paddle's device of that name."""
    return [problem for rule in LAUNCH_RULES for problem in rule(config, device)]


def one_model_source(config: RunConfig) -> Problems:
    model = config.model
    if (model.pretrained is None) == (model.config is None):
        found = "neither is" if model.pretrained is None else "both are"
        yield (
            f"{found} set of model.pretrained and model.config: set model.pretrained to start from "
            "a checkpoint, or model.config to start from random weights"
        )


def one_data_source(config: RunConfig) -> Problems:
    data = config.data
    if bool(data.train) == (data.synthetic_samples is not None):
        found = "both are" if data.train else "neither is"
        yield (
            f"{found} set of data.train and data.synthetic_samples: name the files in data.train; "
            "a policy can also be trained on made-up demonstrations, data.synthetic_samples"
        )


def groups_are_of_files(config: RunConfig) -> Problems:
    data = config.data
    files, grouped = {*data.train, *data.eval}, set(data.groups)
    if grouped and (wrong := sorted(files ^ grouped)):
        yield (
            f"data.groups and the files of data.train and data.eval differ in {', '.join(wrong)}: "
            "give every file its group, or none"
        )


def one_length(config: RunConfig) -> Problems:
    train = config.train
    if (train.max_steps is None) == (train.num_train_epochs is None):
        found = "neither is" if train.max_steps is None else "both are"
        yield f"{found} set of train.max_steps and train.num_train_epochs: set one"


def processor_is_known(config: RunConfig) -> Problems:
    if config.data.processor is None and config.model.pretrained is None:
        yield (
            "data.processor is not set and there is no model.pretrained to take it from: set "
            "data.processor to a folder with tokenizer.json and preprocessor_config.json"
        )


def warmup_fits(config: RunConfig) -> Problems:
    train = config.train
    if train.max_steps is not None and train.warmup_steps > train.max_steps:
        yield (
            f"train.warmup_steps {train.warmup_steps} exceeds train.max_steps {train.max_steps}: "
            "the learning rate would never reach train.learning_rate"
        )


def floor_needs_cosine(config: RunConfig) -> Problems:
    train = config.train
    if train.min_lr_ratio and train.lr_scheduler_type == "constant":
        yield (
            f"train.min_lr_ratio {train.min_lr_ratio} has no effect on a constant schedule: set "
            "train.lr_scheduler_type=cosine or remove it"
        )


def decay_steps_have_a_schedule(config: RunConfig) -> Problems:
    train = config.train
    if train.decay_steps and train.lr_scheduler_type != "cosine_decay_with_warmup":
        yield (
            f"train.decay_steps {train.decay_steps} has no effect with train.lr_scheduler_type "
            f"{train.lr_scheduler_type}: set that to cosine_decay_with_warmup, or remove it"
        )


def packing_is_consistent(config: RunConfig) -> Problems:
    data = config.data
    if not data.packing:
        for name in ("packing_length", "max_vision_tokens_per_row"):
            if (value := getattr(data, name)) is not None:
                yield f"data.{name} is {value} but data.packing is false: set data.packing=true"
        return
    if data.packing_length is not None and data.packing_length < data.max_length:
        yield (
            f"data.packing_length {data.packing_length} is below data.max_length "
            f"{data.max_length}: a sample of that length would fit no row; raise the one or lower "
            "the other"
        )
    if data.padding_side == "left":
        yield (
            "data.padding_side is left but packed rows are filled up at the right: set "
            "data.padding_side=right or data.packing=false"
        )


def padding_is_a_part(config: RunConfig) -> Problems:
    data = config.data
    longest = max(data.max_length, data.packing_length or 0)
    if data.pad_to_multiple_of > longest:
        yield (
            f"data.pad_to_multiple_of {data.pad_to_multiple_of} exceeds the longest row of "
            f"{longest} tokens (data.max_length, data.packing_length): every row would be filled "
            f"up to {data.pad_to_multiple_of} tokens, {data.pad_to_multiple_of / longest:.3g} "
            "times what its memory and time are for"
        )


def evaluation_has_data(config: RunConfig) -> Problems:
    if config.train.eval_steps is not None and not config.data.eval:
        yield (
            f"train.eval_steps is {config.train.eval_steps} but data.eval lists no file: name the "
            "evaluation files or remove train.eval_steps"
        )


def adapters_have_a_base(config: RunConfig) -> Problems:
    if config.model.lora is not None and config.model.pretrained is None:
        yield (
            "model.lora trains adapters beside a checkpoint, which they are saved without, but "
            "model.pretrained is not set: set it, or remove model.lora to train all of model.config"
        )


def part_rates_have_a_whole(config: RunConfig) -> Problems:
    if config.train.part_learning_rates and config.train.learning_rate == 0:
        yield (
            "train.part_learning_rates are peaks of the schedule of train.learning_rate, which is "
            "0: set it above 0, and freeze (model.freeze) what is not to be trained"
        )


def reserved_rows_have_messages(config: RunConfig) -> Problems:
    parallel = config.parallel
    for name in ("pp_token_rows", "pp_visual_rows"):
        if (rows := getattr(parallel, name)) is None:
            continue
        if parallel.pp_degree == 1:
            yield (
                f"parallel.{name} is {rows} but parallel.pp_degree is 1, so there are no messages "
                f"between stages: remove parallel.{name}, or set pp_degree to 2 or more"
            )
        elif parallel.pp_shapes == "dynamic":
            yield (
                f"parallel.{name} is {rows} but parallel.pp_shapes is dynamic, where each message "
                f"has its own size: remove parallel.{name}, or set pp_shapes to static"
            )


def visual_bounds_are_ordered(config: RunConfig) -> Problems:
    for name in ("{}_pixels", "video_{}_pixels", "video_{}_frames"):
        lowest, highest = name.format("min"), name.format("max")
        low, high = getattr(config.data, lowest), getattr(config.data, highest)
        if low is not None and high is not None and low > high:
            yield f"data.{lowest} {low} exceeds data.{highest} {high}"


def sharding_settings_have_an_effect(config: RunConfig) -> Problems:
    parallel = config.parallel
    stage = parallel.sharding_stage if parallel.sharding_degree > 1 else 0
    found = f"parallel.sharding_stage is {stage}" if stage else "parallel.sharding_degree is 1"
    if parallel.sharding_gather_overlap and stage != 1:
        yield (
            f"parallel.sharding_gather_overlap is true but {found}: it is of stage 1; set "
            "parallel.sharding_degree above 1 and sharding_stage=1, or remove it"
        )
    if not parallel.reshard_after_forward and stage != 3:
        yield (
            f"parallel.reshard_after_forward is false but {found}: only stage 3 frees parameters "
            "behind a forward pass; set parallel.sharding_stage=3, or remove it"
        )
    if parallel.reduce_once_per_step and stage != 2:
        yield (
            f"parallel.reduce_once_per_step is true but {found}: stage 1 does so in any case, and "
            "stage 3 holds no whole gradients; set parallel.sharding_stage=2, or remove it"
        )
    if parallel.reduce_once_per_step and config.train.gradient_accumulation_steps == 1:
        yield (
            "parallel.reduce_once_per_step is true but train.gradient_accumulation_steps is 1, so "
            "every step reduces once: remove it, or set train.gradient_accumulation_steps above 1"
        )
    if parallel.reduce_dtype == "bfloat16":
        if stage < 2:
            yield (
                f"parallel.reduce_dtype is bfloat16 but {found}: it is of stages 2 and 3; set "
                "parallel.sharding_stage=2, or remove it"
            )
        if config.model.compute_dtype != "bfloat16":
            yield (
                f"parallel.reduce_dtype is bfloat16 but model.compute_dtype is "
                f"{config.model.compute_dtype}, whose gradients it would round: set "
                "model.compute_dtype=bfloat16, or remove it"
            )


def dtype_runs_on_device(config: RunConfig, device: str) -> Problems:
    if config.model.compute_dtype == "bfloat16" and device.startswith("cpu"):
        yield (
            "model.compute_dtype is bfloat16 but the device is the CPU, where Paddle has no "
            "bfloat16 kernels: set model.compute_dtype=float32 or run on a GPU"
        )


def files_exist(config: RunConfig, device: str) -> Problems:
    model, data = config.model, config.data
    for name, files in (("data.train", data.train), ("data.eval", data.eval)):
        for i, file in enumerate(files):
            if not Path(file).is_file():
                yield _absent(f"{name}[{i}]", file, "file")
    if data.statistics is not None and not Path(data.statistics).is_file():
        yield _absent("data.statistics", data.statistics, "file")
    for name, folder in (
        ("model.pretrained", model.pretrained), ("data.processor", data.processor),
    ):  # fmt: skip
        if folder is not None and not Path(folder).is_dir():
            yield _absent(name, folder, "folder")
    # What does not look like a file may be the name of a size, which the model's code knows.
    path = Path(model.config) if isinstance(model.config, str) else None
    if path is not None and path.suffix == ".json" and not path.is_file():
        yield _absent("model.config", model.config, "file")


def output_can_be_written(config: RunConfig, device: str) -> Problems:
    output = Path(config.train.output_dir)
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not there.is_dir():
        yield f"train.output_dir {output}: {there} is a file, not a folder; choose another folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield (
            f"train.output_dir {output}: {there} cannot be written to by this user; choose another "
            "folder, or change who may"
        )


def workers_fit(config: RunConfig, device: str) -> Problems:
    workers = config.data.num_workers
    needed, have = workers * _WORKER_BYTES, machine_memory()
    if needed > have:
        yield (
            f"data.num_workers {workers} would take {needed / 1e9:.0f} GB on each process of the "
            f"training, before any sample, of {have / 1e9:.0f} GB that this machine has: a few for "
            f"each of its {os.cpu_count()} cores do"
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


def _absent(name: str, path: str, kind: str) -> str:
    return f"{name}: no {kind} {path} (paths are relative to the current directory, {Path.cwd()})"


CONFIG_RULES = (
    one_model_source,
    one_data_source,
    groups_are_of_files,
    one_length,
    processor_is_known,
    warmup_fits,
    floor_needs_cosine,
    decay_steps_have_a_schedule,
    packing_is_consistent,
    padding_is_a_part,
    evaluation_has_data,
    adapters_have_a_base,
    part_rates_have_a_whole,
    reserved_rows_have_messages,
    visual_bounds_are_ordered,
    sharding_settings_have_an_effect,
)
LAUNCH_RULES = (
    dtype_runs_on_device,
    files_exist,
    workers_fit,
    output_can_be_written,
    output_is_unused,
)
