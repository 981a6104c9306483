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

WORDS_HELP = """\
OpenTau's words:
  --config_path=FILE              CONFIG
  --policy.NAME=VALUE             model.policy.NAME=VALUE; --policy.path is model.pretrained
  --num_cams=N                    --cameras N
  --batch_size=N, --dataloader_batch_size=N, --gradient_accumulation_steps=N
                                  train.per_device_train_batch_size and
                                  train.gradient_accumulation_steps (default 1, as there)
  --num_workers=N, --prefetch_factor=N, --seed=N, --output_dir=DIR
                                  data.num_workers, data.prefetch_batches, train.seed and
                                  train.output_dir
  --dataset_mixture.NAME_drop_prob=P, --dataset_mixture.n_obs_history=N
                                  data.drops.NAME_drop_prob=P, model.policy.n_obs_steps=N
  --dataset_mixture.NAME=VALUE, --wandb.NAME=VALUE
                                  without effect: the data are those of data.train, or synthetic,
                                  and a profile publishes nothing
variables, which options take precedence over:
  PROFILE_STEPS=N                 --steps N
  PROFILE_STEP_JSON=FILE          --json FILE
  PROFILE_NO_OPTIM=1              --no-optimizer
  ATTENTION_IMPL=NAME             --attention NAME
  GRAD_CHECKPOINT=true|false      --recompute full|none
  FIND_UNUSED_PARAMS, FUSED_ADAMW=true, TORCH_COMPILE=false
                                  without effect: gradients that a rank lacks are always reduced as
                                  zeros, AdamW is one fused kernel per parameter, and nothing is
                                  compiled"""

_MIXTURE = "dataset_mixture."
_BATCHES = ("batch_size", "dataloader_batch_size", "gradient_accumulation_steps")
_DROPS = (
    "history_state_drop_prob metadata_drop_all_prob metadata_drop_each_prob response_drop_prob "
    "subgoal_drop_prob"
).split()
# OpenTau's descriptions of a data set; the lines of data.train have frames that were chosen.
_OF_DATA_SETS = (
    "action_freq datasets delta_stats_max_rows emit_fps image_resample_strategy "
    "require_non_empty_control_mode require_non_empty_robot_type skip_timestamp_check "
    "subgoal_end_of_segment_prob tolerance_s val_enable_optional_key_dropout "
    "val_enable_prompt_substitution val_split_ratio vector_resample_strategy weights"
).split()
# Options and their settings; None where one has no effect.
_OPTIONS: dict[str, str | None] = {
    "policy.path": "model.pretrained",
    "policy.pretrained_path": "model.pretrained",
    "num_workers": "data.num_workers",
    "prefetch_factor": "data.prefetch_batches",
    "seed": "train.seed",
    "output_dir": "train.output_dir",
    f"{_MIXTURE}n_obs_history": "model.policy.n_obs_steps",
    **{f"{_MIXTURE}{name}": f"data.drops.{name}" for name in _DROPS},
    **{f"{_MIXTURE}{name}": None for name in _OF_DATA_SETS},
}
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


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
        is_opentaus = name in ("config_path", *_BATCHES, *_OPTIONS) or name.startswith(
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
        elif (setting := _setting(name)) is None:
            logger.info("--%s has no effect here", name)
        else:
            # draccus writes null as None; a history of null is one frame.
            null = "1" if name.endswith("n_obs_history") else "null"
            kept.append(f"{setting}={null if value == 'None' else value}")
    if len(configs) > 1:
        raise ValueError(f"--config_path is given twice, {' and '.join(configs)}: give one")
    return [*configs, *kept, *_batch_settings(batches)]


def _setting(name: str) -> str | None:
    """The setting of an option; None if it has no effect.

    Raises:
        ValueError: OpenTau's data mixture has no such field.
    """
    if name in _OPTIONS:
        return _OPTIONS[name]
    if name.startswith(_MIXTURE):
        field = name.removeprefix(_MIXTURE).split(".")[0]
        if field not in _OF_DATA_SETS:
            known = [option for option in _OPTIONS if option.startswith(_MIXTURE)]
            raise ValueError(f"--{name} is no option; {nearest(name, known, '--')}")
    return f"model.{name}" if name.startswith("policy.") else None


def _batch_settings(given: Mapping[str, int]) -> list[str]:
    """Settings of OpenTau's batch sizes of a rank: an update takes batch_size samples, in
    micro-batches of dataloader_batch_size."""
    if not given:
        return []
    whole, micro, count = (given.get(name) for name in _BATCHES)
    if count is None:
        count = whole // micro if whole and micro else 1
    if micro is None:
        micro = None if whole is None else whole // count
    if whole is not None and micro is not None and whole != micro * count:
        shown = ", ".join(f"--{name} {value}" for name, value in given.items())
        raise ValueError(
            f"{shown}: batch_size must be dataloader_batch_size x gradient_accumulation_steps"
        )
    settings = [f"train.gradient_accumulation_steps={count}"]
    return settings if micro is None else [*settings, f"train.per_device_train_batch_size={micro}"]


def words_of_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The options of OpenTau's variables that are set; logs those without effect.

    Raises:
        ValueError: a value that is wrong or has no counterpart; names the variable.
    """
    words = []
    if "PROFILE_STEPS" in environment:
        words.append(f"--steps={_whole('PROFILE_STEPS', environment['PROFILE_STEPS'])}")
    if file := environment.get("PROFILE_STEP_JSON"):
        words.append(f"--json={file}")
    if _truth(environment, "PROFILE_NO_OPTIM"):
        words.append("--no-optimizer")
    if "ATTENTION_IMPL" in environment:
        words.append(f"--attention={environment['ATTENTION_IMPL']}")
    if (checkpointing := _truth(environment, "GRAD_CHECKPOINT")) is not None:
        words.append(f"--recompute={'full' if checkpointing else 'none'}")
    if _truth(environment, "TORCH_COMPILE"):
        raise ValueError("TORCH_COMPILE is true, and there is no torch here: unset it")
    if _truth(environment, "FUSED_ADAMW") is False:
        raise ValueError("FUSED_ADAMW is false, and Paddle's AdamW is fused: unset it")
    for name in ("FIND_UNUSED_PARAMS", "FUSED_ADAMW", "TORCH_COMPILE"):
        if _truth(environment, name) is not None:
            logger.info("%s=%s has no effect here", name, environment[name])
    return words


def _truth(environment: Mapping[str, str], name: str) -> bool | None:
    value = environment.get(name)
    if value is None:
        return None
    if value.lower() not in _TRUTH:
        raise ValueError(f"{name} is {value!r}: set it to true or false, or unset it")
    return _TRUTH[value.lower()]


def _whole(name: str, value: str) -> int:
    if not (value.isdecimal() and int(value) > 0):
        raise ValueError(f"{name} is {value!r}: it must be a whole number of at least 1")
    return int(value)
