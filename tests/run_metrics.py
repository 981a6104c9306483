"""What a run wrote of itself, less what depends on the machine and the moment."""

import json
from pathlib import Path

_OF_THE_MACHINE = ("_per_second", "_seconds", "memory")


def metrics_of(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def lasting(lines: list[dict]) -> list[dict]:
    """The lines without entries that another run of the same may have differently."""
    return [
        {key: v for key, v in line.items() if not any(part in key for part in _OF_THE_MACHINE)}
        for line in lines
    ]
