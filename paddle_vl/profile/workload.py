"""What a profile measures: its training data, its steps, and choices of settings.

Importing it does not load Paddle, whose threads a command sets before.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from paddle_vl.config.families import family_of_run
from paddle_vl.config.schema import RunConfig

# Global batches of a synthetic epoch; several, so that sample order is as with real data.
_BATCHES = 8


@dataclass(frozen=True)
class Workload:
    """Training data of a profile.

    Attributes:
        is_synthetic: whether samples are synthetic.
        cameras, image_side, answer_tokens: shapes of synthetic samples, see `FamilyEntry.ask`; None
            for the family's defaults. `cameras` is also the number of a policy that trains on its
            own data.
    """

    is_synthetic: bool = False
    cameras: int | None = None
    image_side: int | None = None
    answer_tokens: int | None = None


@dataclass(frozen=True)
class ProfileSettings:
    """Settings of a profile.

    Attributes:
        out: folder for the result.
        workload: training data.
        warmup_steps, steps: numbers of unmeasured steps and of measured steps after them.
        memory_limit_gb: limit per rank, above which the profile ends. None: the GPU's memory, or no
            limit on a CPU.
        updates: False skips optimizer state, gradient norm and updates, to measure forward and
            backward alone.
        copy: a further file for the result.
    """

    out: Path
    workload: Workload
    warmup_steps: int = 5
    steps: int = 20
    memory_limit_gb: float | None = None
    updates: bool = True
    copy: Path | None = None

    def arguments(self) -> list[str]:
        """The options of `paddle-vl profile` for these settings."""
        flags = {
            "--out": self.out,
            "--warmup": self.warmup_steps,
            "--steps": self.steps,
            "--memory-limit-gb": self.memory_limit_gb,
            "--json": self.copy,
            "--cameras": self.workload.cameras,
            "--image-side": self.workload.image_side,
            "--answer-tokens": self.workload.answer_tokens,
        }
        given = [[flag, str(value)] for flag, value in flags.items() if value is not None]
        switches = {"--synthetic": self.workload.is_synthetic, "--no-optimizer": not self.updates}
        return [*chain(*given), *(flag for flag, is_on in switches.items() if is_on)]


def with_workload(config: RunConfig, workload: Workload, folder: Path) -> RunConfig:
    """The configuration with the workload's data.

    Args:
        folder: for generated files.

    Raises:
        ValueError: the run's own data or this family do not support the workload.
    """
    shapes = {name: getattr(workload, name) for name in ("cameras", "image_side", "answer_tokens")}
    shapes = {name: value for name, value in shapes.items() if value is not None}
    family = family_of_run(config)
    if not workload.is_synthetic:
        for name in ("image_side", "answer_tokens"):
            if name in shapes:
                name = name.replace("_", "-")
                raise ValueError(f"--{name} shapes made-up samples: it needs --synthetic")
        return family.ask("cameras", config, shapes["cameras"]) if shapes else config
    parallel, train = config.parallel, config.train
    num_samples = _BATCHES * parallel.data_degree * train.per_device_train_batch_size
    return family.ask("synthetic_data", config, folder, num_samples, shapes)


def has_policy_settings(config: RunConfig) -> bool:
    """Whether the run's family has `model.policy`, OpenTau's settings of a policy."""
    return "policy" in type(config.model).model_fields


def recompute_settings(config: RunConfig, choice: str) -> dict[str, Any]:
    """The settings of a choice of `train.recompute`."""
    settings: dict[str, Any] = {"train.recompute": choice}
    if has_policy_settings(config):
        # A policy's own configuration may turn it on too.
        settings["model.policy.gradient_checkpointing"] = "true" if choice == "full" else "false"
    return settings


def attention_settings(config: RunConfig, choice: str) -> dict[str, Any]:
    """The setting of an attention implementation.

    Raises:
        ValueError: the run's family has no choice of it.
    """
    if not has_policy_settings(config):
        raise ValueError(
            f"attention implementation {choice}: a {config.family} run has no such choice, its "
            "device decides; leave --attention and ATTENTION_IMPL out"
        )
    return {"model.policy.attention_implementation": choice}
