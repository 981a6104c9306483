"""OpenTau's words for `paddle-vl profile`: the options and variables of its profile_step.py.

    accelerate launch ... profile_step.py --config_path=run.json --policy.dropout=0.1 --num_cams=4
    paddle-vl profile --config_path=run.yaml --policy.dropout=0.1 --num_cams=4 --synthetic

`--config_path` names a run file of this package. Options on the command line take precedence over
variables. What has no counterpart here is refused, or named as without effect where every value of
it means the same.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
variables, which options take precedence over:
  PROFILE_STEPS=N                 --steps N
  PROFILE_STEP_JSON=FILE          --json FILE
  PROFILE_NO_OPTIM=1              --no-optimizer
  ATTENTION_IMPL=NAME             model.policy.attention_implementation=NAME; with --matrix
                                  --attention NAME
  GRAD_CHECKPOINT=true|false      train.recompute=full|none; with --matrix --recompute
  FIND_UNUSED_PARAMS, FUSED_ADAMW=true, TORCH_COMPILE=false
                                  without effect: gradients that a rank lacks are always reduced as
                                  zeros, AdamW is one fused kernel per parameter, and nothing is
                                  compiled"""

_SETTINGS = {
    "num_workers": "data.num_workers",
    "prefetch_factor": "data.prefetch_batches",
    "seed": "train.seed",
    "output_dir": "train.output_dir",
}
_BATCHES = ("batch_size", "dataloader_batch_size", "gradient_accumulation_steps")
_PATHS = ("policy.path", "policy.pretrained_path")
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def translated(arguments: Sequence[str]) -> list[str]:
    """The arguments of `profile` with OpenTau's options in the words of this package.

    Raises:
        ValueError: an option without a value, two CONFIGs, or batch sizes that contradict each
            other.
    """
    kept: list[str] = []
    config: str | None = None
    batches: dict[str, int] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not _is_opentaus(name):
            kept.append(argument)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"--{name} has no value: write --{name}=VALUE")
            value = rest.pop(0)
        if name == "config_path":
            if config is not None:
                raise ValueError(f"--config_path is given twice, {config} and {value}: give one")
            config = value
        elif name in _BATCHES:
            batches[name] = _whole(f"--{name}", value)
        else:
            # draccus writes null as None.
            kept.append(f"{_setting(name)}={'null' if value == 'None' else value}")
    kept += _batch_settings(batches)
    return kept if config is None else [config, *kept]


def _is_opentaus(name: str) -> bool:
    known = name == "config_path" or name in _BATCHES or name in _SETTINGS
    return known or name.startswith("policy.")


def _setting(name: str) -> str:
    if name in _PATHS:
        return "model.pretrained"
    return f"model.{name}" if name.startswith("policy.") else _SETTINGS[name]


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


@dataclass(frozen=True)
class Variables:
    """OpenTau's variables that are set; None where one is not.

    Attributes:
        recompute: `full` or `none`, from GRAD_CHECKPOINT.
    """

    steps: int | None = None
    json: Path | None = None
    no_optimizer: bool = False
    attention: str | None = None
    recompute: str | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "Variables":
        """Read them from the environment; logs those without effect.

        Raises:
            ValueError: a value that is wrong or has no counterpart; names the variable.
        """
        steps, file = environment.get("PROFILE_STEPS"), environment.get("PROFILE_STEP_JSON")
        checkpointing = _truth(environment, "GRAD_CHECKPOINT")
        if _truth(environment, "TORCH_COMPILE"):
            raise ValueError("TORCH_COMPILE is true, and there is no torch here: unset it")
        if _truth(environment, "FUSED_ADAMW") is False:
            raise ValueError("FUSED_ADAMW is false, and Paddle's AdamW is fused: unset it")
        for name in ("FIND_UNUSED_PARAMS", "FUSED_ADAMW", "TORCH_COMPILE"):
            if _truth(environment, name) is not None:
                logger.info("%s=%s has no effect here", name, environment[name])
        return cls(
            steps=None if steps is None else _whole("PROFILE_STEPS", steps),
            json=Path(file) if file else None,
            no_optimizer=bool(_truth(environment, "PROFILE_NO_OPTIM")),
            attention=environment.get("ATTENTION_IMPL"),
            recompute=None if checkpointing is None else "full" if checkpointing else "none",
        )


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
