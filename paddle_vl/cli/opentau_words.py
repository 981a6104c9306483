"""OpenTau's words for `paddle-vl profile`: the options and variables of its profile_step.py.

    accelerate launch ... profile_step.py --config_path=run.json --policy.dropout=0.1 --num_cams=4
    paddle-vl profile --config_path=run.yaml --policy.dropout=0.1 --num_cams=4 --synthetic

`--config_path` names a run file of this package. Options on the command line take precedence over
variables. What has no counterpart here is refused, or named as without effect where the profile is
the same for every value of it, or is that of the run file's own data.
"""

import logging
import os
from collections.abc import Mapping, Sequence

from paddle_vl.files.names import nearest

logger = logging.getLogger(__name__)

_MIXTURE = "dataset_mixture."
_BATCHES = ("batch_size", "dataloader_batch_size", "gradient_accumulation_steps")
# Options and their settings.
_SETTINGS = {
    "policy.path": "model.pretrained",
    "policy.pretrained_path": "model.pretrained",
    "num_workers": "data.num_workers",
    "prefetch_factor": "data.prefetch_batches",
    "seed": "train.seed",
    "output_dir": "train.output_dir",
    f"{_MIXTURE}n_obs_history": "model.policy.n_obs_steps",
    **{
        f"{_MIXTURE}{name}_prob": f"data.drops.{name}_prob"
        for name in (
            *("history_state_drop", "metadata_drop_all", "metadata_drop_each"),
            *("response_drop", "subgoal_drop"),
        )
    },
}
# OpenTau's descriptions of a data set; the lines of data.train have frames that were chosen.
_OF_DATA_SETS = (
    "action_freq datasets delta_stats_max_rows emit_fps image_resample_strategy "
    "require_non_empty_control_mode require_non_empty_robot_type skip_timestamp_check "
    "subgoal_end_of_segment_prob tolerance_s val_enable_optional_key_dropout "
    "val_enable_prompt_substitution val_split_ratio vector_resample_strategy weights"
).split()
# Variables and their options: before the value, or for true and for false. None has no effect; a
# sentence refuses.
_VARIABLES: dict[str, str | tuple[str | None, str | None]] = {
    "PROFILE_STEPS": "--steps=",
    "PROFILE_STEP_JSON": "--json=",
    "ATTENTION_IMPL": "--attention=",
    "PROFILE_NO_OPTIM": ("--no-optimizer", ""),
    "GRAD_CHECKPOINT": ("--recompute=full", "--recompute=none"),
    # Gradients that a rank lacks are always reduced as zeros.
    "FIND_UNUSED_PARAMS": (None, None),
    "FUSED_ADAMW": (None, "Paddle's AdamW is fused"),
    "TORCH_COMPILE": ("there is no torch here", None),
}

WORDS_HELP = """\
OpenTau's options (--config_path, --policy.NAME, --num_cams, --dataset_mixture.NAME, ...) and
variables (PROFILE_STEPS, ATTENTION_IMPL, GRAD_CHECKPOINT, ...) are taken, too: docs/profiling.md
has the tables. Options take precedence over variables."""


def translated(arguments: Sequence[str]) -> list[str]:
    """The arguments of `profile` with OpenTau's options in the words of this package.

    Raises:
        ValueError: an option without a value, two CONFIGs, or batch sizes that contradict each
            other.
    """
    kept: list[str] = []
    configs: list[str] = []
    batches: dict[str, int] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        is_opentaus = name in ("config_path", *_BATCHES, *_SETTINGS) or name.startswith(
            ("policy.", "wandb.", _MIXTURE)
        )
        if not argument.startswith("--") or not is_opentaus:
            kept.append(argument)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"--{name} has no value: write --{name}=VALUE")
            value = rest.pop(0)
        if name == "config_path":
            configs.append(value)
        elif name in _BATCHES:
            batches[name] = _whole(f"--{name}", value)
        elif name in _SETTINGS or name.startswith("policy."):
            # draccus writes null as None; a history of null is one frame.
            if value == "None":
                value = "1" if name.endswith("n_obs_history") else "null"
            kept.append(f"{_SETTINGS.get(name, f'model.{name}')}={value}")
        else:
            known = [f"{_MIXTURE}{field}" for field in _OF_DATA_SETS]
            if name.startswith(_MIXTURE) and ".".join(name.split(".")[:2]) not in known:
                raise ValueError(
                    f"--{name} is no option; {nearest(name, [*known, *_SETTINGS], '--')}"
                )
            logger.info("--%s has no effect here", name)
    if len(configs) > 1:
        raise ValueError(f"--config_path is given twice, {' and '.join(configs)}: give one")
    return [*configs, *kept, *_batch_settings(batches)]


def _batch_settings(given: Mapping[str, int]) -> list[str]:
    """Settings of OpenTau's batch sizes of a rank: an update takes batch_size samples, in
    micro-batches of dataloader_batch_size."""
    whole, micro, count = (given.get(name) for name in _BATCHES)
    count = count or (whole // micro if whole and micro else 1)
    micro = micro or (whole and whole // count)
    if whole and whole != (micro or 0) * count:
        shown = ", ".join(f"--{name} {value}" for name, value in given.items())
        raise ValueError(
            f"{shown}: batch_size must be dataloader_batch_size x gradient_accumulation_steps"
        )
    settings = {"gradient_accumulation_steps": count, "per_device_train_batch_size": micro}
    return [f"train.{name}={value}" for name, value in settings.items() if given and value]


def words_of_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The options of OpenTau's variables that are set; logs those without effect.

    Raises:
        ValueError: a value that is wrong or has no counterpart; names the variable.
    """
    words = []
    for name, option in _VARIABLES.items():
        if not (value := environment.get(name, "")):
            continue
        if isinstance(option, str):
            words.append(f"{option}{_whole(name, value) if name == 'PROFILE_STEPS' else value}")
            continue
        if value.lower() not in ("true", "1", "false", "0"):
            raise ValueError(f"{name} is {value!r}: set it to true or false, or unset it")
        word = option[value.lower() in ("false", "0")]
        if word is None:
            logger.info("%s=%s has no effect here", name, value)
        elif word.startswith("--"):
            words.append(word)
        elif word:
            raise ValueError(f"{name} is {value}, and {word}: unset it")
    return words


def _whole(name: str, value: str) -> int:
    if not (value.isdecimal() and int(value) > 0):
        raise ValueError(f"{name} is {value!r}: it must be a whole number of at least 1")
    return int(value)
