"""A whole examination: the process of the checks, a progress bar, the table, the JSON."""

import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from tqdm import tqdm

import paddle_vl
from paddle_vl.doctor.report import as_json, exit_code, table, write_json
from paddle_vl.doctor.supervise import Finished, supervised

logger = logging.getLogger(__name__)


def examine(
    command: Sequence[str],
    only: Sequence[str] = (),
    is_quick: bool = False,
    json_file: Path | None = None,
) -> int:
    """Run the checks, and print the table.

    Args:
        command: starts a worker, see `paddle_vl.doctor.supervise.supervised`.
        only: names of checks or groups; empty for all.
        json_file: for the findings; written after every check, so that nothing is lost.

    Returns:
        The exit code: 1 if anything is wrong, else 0.

    Raises:
        RefusedError: `only` names what does not exist.
        OSError: the JSON file cannot be written; before anything runs.
    """
    started, begin = datetime.now(timezone.utc).isoformat(timespec="seconds"), time.monotonic()
    findings: list[Finished] = []

    def write() -> None:
        if json_file is not None:
            facts = {
                "paddle_vl": paddle_vl.__version__,
                "started": started,
                "seconds": round(time.monotonic() - begin, 1),
                "only": list(only),
                "is_quick": is_quick,
            }
            write_json(json_file, as_json(findings, **facts))

    write()
    has_bar = sys.stderr.isatty()
    with (
        tempfile.TemporaryDirectory(prefix="paddle-vl-doctor-") as folder,
        tqdm(desc="doctor", unit=" checks", disable=not has_bar, dynamic_ncols=True) as bar,
    ):

        def plan(number: int) -> None:
            bar.reset(total=number)

        for finished in supervised(
            command, Path(folder), only, is_quick, plan, lambda name: bar.set_postfix_str(name)
        ):
            findings.append(finished)
            bar.update()
            if not has_bar:
                # A bar redraws its line, which would fill a log file.
                status, found = finished.result.status, finished.result.found
                print(f"{finished.name}: {status}: {found}", file=sys.stderr, flush=True)
            write()
    print(table(findings))
    if json_file is not None:
        print(f"written to {json_file}")
    return exit_code(findings)
