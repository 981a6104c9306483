"""Rules between several settings, or between a setting and the machine.

That a setting needs another is said where it is declared, see `paddle_vl.config.section.OnlyWith`.
`rule_problems` need the settings alone and run when a file is loaded; `launch_problems` look at
files and device before anything is built. Families add rules in their subclass of `RunConfig`.
Rules about the mesh of ranks are in `paddle_vl.parallel.degrees`.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from paddle_vl.config.data_sources import SourceConfig, matches
from paddle_vl.config.families import model_values
from paddle_vl.config.patterns import misspelt_groups
from paddle_vl.config.schema import RunConfig, TrainConfig
from paddle_vl.config.section import settings_without_effect

Problems = Iterator[str]
_RUN_FILES = re.compile(r"checkpoint-\d+|final|metrics\.jsonl")


def rule_problems(config: RunConfig) -> list[str]:
    """Problems of the settings alone."""
    return [
        *_problems_of_what_is_trained(config),
        *_problems_of_length(config),
        *settings_without_effect(config),
        *config.problems(),
    ]


def launch_problems(config: RunConfig, device: str) -> list[str]:
    """What prevents the run from starting on this machine, on the Paddle device of that name."""
    return [
        *_absent_files(config),
        *_problems_of_machine(config, device),
        *_problems_of_output(config),
    ]


def _problems_of_what_is_trained(config: RunConfig) -> Problems:
    model, data, train = config.model, config.data, config.train
    if model.pretrained is None and model.config is None:
        yield (
            "neither is set of model.pretrained and model.config: set model.pretrained to start "
            "from a checkpoint, or model.config to start from random weights"
        )
    elif model.pretrained is not None and model.config is not None:
        values = model_values(model.pretrained)
        # A folder that is not there yet is reported when the run starts.
        if not config.backbones or (values and values.get("model_type") not in config.backbones):
            yield (
                "both are set of model.pretrained and model.config: remove model.config, as the "
                "checkpoint has its own; only the backbone of a policy (gemma3) needs one beside it"
            )
    if config.needs_processor and data.processor is None and model.pretrained is None:
        yield (
            "data.processor is not set and there is no model.pretrained to take it from: set "
            "data.processor to a folder with tokenizer.json and preprocessor_config.json"
        )
    if config.trains_adapters and model.pretrained is None:
        yield (
            "model.lora trains adapters on a checkpoint, which is not saved with them, but "
            "model.pretrained is not set: set it, or remove model.lora to train all of "
            "model.config"
        )
    if config.trains_adapters and train.ema is not None:
        yield (
            "train.ema averages weights that are trained in full, and model.lora trains adapters, "
            "whose factors' average is no average of their product: set train.ema=null"
        )
    if train.eval_steps is not None and not data.has_eval:
        yield (
            f"train.eval_steps is {train.eval_steps} but data.eval lists no file: name the "
            "evaluation files or remove train.eval_steps"
        )
    if (best := train.best) is not None:
        for name, needed, is_lacking in (
            ("metric", "data.eval", not data.has_eval),
            ("patience", "train.eval_steps", best.patience and train.eval_steps is None),
            ("min_delta", "train.best.patience", best.min_delta and best.patience is None),
        ):
            if is_lacking:
                yield (
                    f"train.best.{name} is {getattr(best, name)} but {needed} is not set, without "
                    f"which it has no effect: set {needed}, or remove train.best.{name}"
                )
    for guard in train.guard:
        needs_steps = guard.action == "stop" and train.eval_steps is None
        if not data.has_eval or needs_steps:
            needed = "train.eval_steps" if data.has_eval else "data.eval"
            yield (
                f"train.guard compares {guard.metric} of evaluations but {needed} is not set: set "
                f"{needed}, or remove train.guard"
            )
    if train.part_learning_rates and train.learning_rate == 0:
        yield (
            "train.part_learning_rates are peaks of the schedule of train.learning_rate, which is "
            "0: set it above 0, and freeze (model.freeze) what is not to be trained"
        )
    for setting, patterns in (
        ("model.freeze", model.freeze),
        ("model.lora.modules_to_save", getattr(config.lora, "modules_to_save", ())),
        ("train.part_learning_rates", train.part_learning_rates),
        ("train.layer_decay", train.layer_decay),
        ("train.unfreeze", [pattern for entry in train.unfreeze for pattern in entry.patterns]),
        ("train.weight_decay_exclude", train.weight_decay_exclude),
    ):
        yield from misspelt_groups(patterns, setting, config.parts)
    if config.parallel.schedule == "colocated" and not config.has_colocated:
        yield (
            f"parallel.schedule is colocated, which {config.family} does not support yet: set "
            "parallel.schedule=plain"
        )
    if config.parallel.cp_degree > 1 and not config.has_context_parallel:
        yield (
            f"parallel.cp_degree is {config.parallel.cp_degree}, but {config.family} cannot cut "
            "its rows into slices: they are short, and attend to blocks, not to all rows before; "
            "set parallel.cp_degree=1"
        )


def _problems_of_length(config: RunConfig) -> Problems:
    train = config.train
    names = ("max_steps", "num_train_epochs", "max_tokens")
    given = [f"train.{name}" for name in names if getattr(train, name) is not None]
    if not given:
        yield (
            "no length is set: set one of train.max_steps, train.num_train_epochs and "
            "train.max_tokens"
        )
    elif len(given) > 1:
        yield f"{' and '.join(given)} are set, and a run has one length: set one of them"
    if train.max_tokens is not None:
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
                "train.lr_scheduler_type cosine_decay_with_warmup counts steps, and "
                "train.max_tokens is set: choose cosine, constant or warmup_stable_decay, or set "
                "train.max_steps"
            )
    if train.warmup_steps and train.warmup_ratio:
        yield (
            f"train.warmup_steps {train.warmup_steps} and train.warmup_ratio {train.warmup_ratio} "
            "are both set: set one of them"
        )
    if train.max_steps is not None:
        yield from step_problems(train, train.max_steps, f"train.max_steps {train.max_steps}")
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


def step_problems(train: TrainConfig, num_steps: int, length: str) -> Problems:
    """A warmup that runs into the decay in a run of `num_steps`, and what is frozen for all of it;
    messages say `length`."""
    for entry in train.unfreeze:
        if entry.at >= num_steps:
            yield (
                f"train.unfreeze trains {', '.join(entry.patterns)} after {entry.at} steps, but "
                f"the run ends with {length}: lower at, or freeze them for good (model.freeze)"
            )
    decay = math.ceil(num_steps * (train.decay_ratio or 0))
    if train.warmup_steps < num_steps < train.warmup_steps + decay:
        yield (
            f"train.warmup_steps {train.warmup_steps} and the {train.decay_ratio} of the run in "
            f"which the rate falls (train.decay_ratio) exceed {length}: lower one of them"
        )


def _absent_files(config: RunConfig) -> Problems:
    model, data = config.model, config.data
    files: list[tuple[str, str, bool]] = []
    for setting in ("train", "eval"):
        for i, entry in enumerate(getattr(data, setting)):
            if isinstance(entry, SourceConfig):
                name = f"data.{setting}[{i}].path"
                files += [(name, pattern, bool(matches(pattern))) for pattern in entry.patterns]
            elif isinstance(entry, str) and data.names_a_file(entry):
                files.append((f"data.{setting}[{i}]", entry, Path(entry).is_file()))
    others = dict(config.input_files)
    # Without the suffix it is the name of a published size.
    if isinstance(model.config, str) and model.config.endswith(".json"):
        others["model.config"] = model.config
    files += [(name, file, Path(file).is_file()) for name, file in others.items()]
    folders = {"model.pretrained": model.pretrained, "data.processor": data.processor}
    kinds = [("file", *each) for each in files]
    kinds += [("folder", name, path, Path(path).is_dir()) for name, path in folders.items() if path]
    for kind, name, path, is_there in kinds:
        if not is_there:
            yield (
                f"{name}: no {kind} {path} (paths are relative to the current directory, "
                f"{Path.cwd()})"
            )


def _problems_of_machine(config: RunConfig, device: str) -> Problems:
    if config.model.compute_dtype == "bfloat16" and device.startswith("cpu"):
        yield (
            "model.compute_dtype is bfloat16 but the device is the CPU, where Paddle has no "
            "bfloat16 kernels: set model.compute_dtype=float32 or run on a GPU"
        )


def _problems_of_output(config: RunConfig) -> Problems:
    output = Path(config.train.output_dir)
    nearest = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not nearest.is_dir():
        yield f"train.output_dir {output}: {nearest} is a file, not a folder; choose another folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield (
            f"train.output_dir {output}: this user may not write to {nearest}; choose another "
            "folder, or change its permissions"
        )
    if config.train.resume_from_checkpoint != "none" or not output.is_dir():
        return
    found = sorted(path.name for path in output.iterdir() if _RUN_FILES.fullmatch(path.name))
    if found:
        yield (
            f"train.output_dir {output} already holds a run ({', '.join(found)}): continue it with "
            "train.resume_from_checkpoint=auto, or choose another folder"
        )
