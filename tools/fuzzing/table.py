"""The printed output: a line for each parser, and every fault with its smallest input."""

import re
from collections.abc import Sequence
from pathlib import Path

from fuzzing.campaign import Escape, Limits, Tally, fuzz

_HEAD = f"{'parser':<18}{'inputs':>8}{'accepted':>10}{'refused':>9}{'escaped':>9}{'slowest':>11}"
_MOST_SHOWN = 400


def run_all(names: Sequence[str], limits: Limits, save: Path | None = None) -> int:
    """Try all parsers one after the other and print the outcomes.

    Args:
        save: folder for the smallest input of each fault.

    Returns:
        1 if an input escaped or was not tried; otherwise 0.
    """
    print(f"{_HEAD}{'memory':>12}", flush=True)
    is_good = True
    for name in names:
        tally = fuzz(name, limits)
        print(line(name, tally), flush=True)
        for number, escape in enumerate(tally.escapes.values(), start=1):
            print(described(escape), flush=True)
            if save is not None:
                _save(escape, save / f"{name}-{number}")
        if not tally.is_whole:
            print("  given up: too many inputs ended the process", flush=True)
        is_good = is_good and tally.is_whole and not tally.escapes
    return 0 if is_good else 1


def line(name: str, tally: Tally) -> str:
    """A parser's row of the table; percentages are of its inputs."""
    escaped = sum(escape.count for escape in tally.escapes.values())
    total = max(tally.inputs, 1)
    return (
        f"{name:<18}{tally.inputs:>8}{tally.accepted / total:>10.0%}{tally.refused / total:>9.0%}"
        f"{escaped:>9}{tally.slowest:>9.2f} s{tally.largest:>8.0f} MiB"
    )


def described(escape: Escape) -> str:
    """A fault, its count, its traceback and the smallest input."""
    lines = [f"  {escape.what}, {escape.count} inputs"]
    lines += [f"    | {text}" for text in escape.details.rstrip().splitlines()[-14:]]
    for name, content in escape.files.items():
        shown = repr(content)[1:]
        rest = f"... ({len(content)} bytes)" if len(shown) > _MOST_SHOWN else ""
        lines.append(f"    {name}: {shown[:_MOST_SHOWN]}{rest}")
    return "\n".join(lines)


def _save(escape: Escape, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in escape.files.items():
        (folder / re.sub(r"[^\w.-]", "_", name)).write_bytes(content)
