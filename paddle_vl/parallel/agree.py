"""Agreement of all ranks before anything long begins."""

from collections.abc import Mapping
from typing import Any

from paddle_vl.parallel.objects import gather_values


def check_settings_agree(settings: Mapping[str, Any], where: str) -> None:
    """Compare the settings of all ranks; called by all of them together.

    Args:
        settings: flat, by dotted key; values of JSON's types.
        where: this rank's coordinates, for the message.

    Raises:
        ValueError: on every rank alike, naming each key that differs with all its values.
    """
    everyone = gather_values(dict(settings))
    differing = []
    for key in _differing(everyone):
        values = [settings.get(key) for settings in everyone]
        by_rank = ", ".join(f"rank {rank} {value!r}" for rank, value in enumerate(values))
        differing.append(f"{key} ({by_rank})")
    if differing:
        raise ValueError(
            f"{where}: the processes of this run do not have the same configuration: "
            + "; ".join(differing)
            + ". Start all of them with the same file and the same overrides"
        )


def check_fields_agree(fields: Mapping[str, bool], where: str) -> None:
    """Compare which optional fields the data of all ranks have; called by all of them together.

    Ranks that divide parameters run the same layers for the fields that there are, filled or not,
    so this belongs to the configuration of the data and not to a step.

    Args:
        fields: whether this rank's samples have each, filled or masked; one that is not named
            counts as one that they do not have.
        where: this rank's coordinates, for the message.

    Raises:
        ValueError: on every rank alike, naming each field that only some have, and who has it.
    """
    everyone = gather_values({name: True for name, is_there in fields.items() if is_there})
    differing = []
    for name in _differing(everyone):
        have = [rank for rank, fields in enumerate(everyone) if name in fields]
        lack = [rank for rank, fields in enumerate(everyone) if name not in fields]
        differing.append(f"{name} ({_ranks(have)} with it, {_ranks(lack)} without)")
    if differing:
        raise ValueError(
            f"{where}: the processes of this run do not have the same optional fields in their "
            "data: " + "; ".join(differing) + ". Give all of them the same kinds of data; a field "
            "that a sample has nothing for is there all the same, and masked"
        )


def _differing(everyone: list[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not the same for all, None where there is none, in order."""
    keys = sorted({key for values in everyone for key in values})
    return [key for key in keys if any(v.get(key) != everyone[0].get(key) for v in everyone)]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
