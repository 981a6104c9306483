"""Agreement of all ranks before anything long begins."""

from collections.abc import Mapping
from typing import Any

import paddle.distributed as dist


def check_settings_agree(settings: Mapping[str, Any], where: str) -> None:
    """Compare the settings of all ranks; called by all of them together.

    Args:
        settings: flat, by dotted key; values of plain types.
        where: this rank's coordinates, for the message.

    Raises:
        ValueError: on every rank alike, naming each key that differs with all its values.
    """
    everyone: list[Mapping[str, Any]] = []
    dist.all_gather_object(everyone, dict(settings))
    keys = sorted({key for settings in everyone for key in settings})
    differing = []
    for key in keys:
        values = [settings.get(key) for settings in everyone]
        if any(value != values[0] for value in values):
            by_rank = ", ".join(f"rank {rank} {value!r}" for rank, value in enumerate(values))
            differing.append(f"{key} ({by_rank})")
    if differing:
        raise ValueError(
            f"{where}: the processes of this run do not have the same configuration: "
            + "; ".join(differing)
            + ". Start all of them with the same file and the same overrides"
        )
