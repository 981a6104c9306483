"""The process that runs checks, one after another, and writes what happens to a file.

A crash of a check, a segmentation fault of a kernel included, ends this process only; see
`paddle_vl.doctor.supervise`. Each line of the file is a JSON object:

    {"event": "plan", "checks": [{"name": ..., "title": ..., "limit_s": ...}, ...]}
    {"event": "begin", "check": NAME}
    {"event": "end", "check": NAME, "seconds": ..., "result": {...}}
    {"event": "refused", "reason": ...}

After an error on a GPU the process ends with `RESTART`: a failed kernel leaves a CUDA context in
which everything fails, so the other checks need a new one.
"""

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paddle_vl.doctor.check import (
    TRACEBACK,
    Check,
    Machine,
    UnknownCheckError,
    chosen_checks,
    run_check,
)

EVENTS_FILE, JOB_FILE = "events.jsonl", "job.json"
RESTART = 75


def run_worker(
    folder: Path,
    all_checks: Callable[[], Sequence[Check]],
    find_machine: Callable[[bool, Path], Machine] | None = None,
) -> int:
    """Run the checks that `JOB_FILE` of the folder asks for.

    Args:
        all_checks: every check; some are skipped here, with a reason.
        find_machine: describes the machine; None for `this_machine`.

    Returns:
        The exit code, 0; findings are in the events.
    """
    job = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
    events = (folder / EVENTS_FILE).open("a", encoding="utf-8", buffering=1)

    def tell(event: str, **entries: Any) -> None:
        events.write(json.dumps({"event": event, **entries}) + "\n")
        events.flush()

    machine = (find_machine or this_machine)(job["is_quick"], folder)
    # Paddle's import has put its own handlers in place, which show no Python code.
    faulthandler.disable()
    faulthandler.enable()
    try:
        checks = chosen_checks(all_checks(), **job)
    except UnknownCheckError as error:
        tell("refused", reason=str(error))
        return 0
    tell(
        "plan",
        checks=[
            {"name": check.name, "title": check.title, "limit_s": check.limit_s} for check in checks
        ],
    )
    for check in checks:
        print(f"check: {check.name}", flush=True)
        tell("begin", check=check.name)
        # If it hangs, its output says where.
        faulthandler.dump_traceback_later(0.9 * check.limit_s)
        begin = time.perf_counter()
        result = run_check(check, machine)
        faulthandler.cancel_dump_traceback_later()
        tell(
            "end",
            check=check.name,
            seconds=round(time.perf_counter() - begin, 3),
            result=result.as_json(),
        )
        if machine.device == "gpu" and TRACEBACK in result.figures:
            os._exit(RESTART)
    events.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without Paddle's teardown, which may abort after everything is written.
    os._exit(0)


def this_machine(is_quick: bool, folder: Path) -> Machine:
    """The machine that Paddle computes on."""
    import paddle

    if not paddle.get_device().startswith("gpu"):
        return Machine("cpu", 0, False, is_quick, folder)
    cuda = paddle.device.cuda
    major = cuda.get_device_capability()[0]
    return Machine("gpu", cuda.device_count(), major >= 8, is_quick, folder)
