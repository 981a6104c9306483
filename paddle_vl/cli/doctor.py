"""`paddle-vl doctor`: does this installation work on this machine?"""

import argparse
import os
import sys
from pathlib import Path

from paddle_vl.cli.commands import configure_runtime, configure_training_runtime
from paddle_vl.cli.table import Command, switch, value

_MAIN = Path(__file__).parents[1] / "__main__.py"
_EPILOG = """\
examples:
  paddle-vl doctor --json doctor.json        # attach both to an issue
  paddle-vl doctor --quick
  paddle-vl doctor --only kernels ranks.bandwidth

Every check runs in a process that may crash: a crash or a hang is a finding. The exit code is 1 if
anything is wrong, else 0. docs/doctor.md explains the checks and their bounds."""


def doctor(options: argparse.Namespace) -> int:
    """Run the checks.

    Returns:
        0, or 1 if anything is wrong.
    """
    if options.worker:
        configure_training_runtime()
        from paddle_vl.doctor.check import all_checks
        from paddle_vl.doctor.examination import run_checks

        return run_checks(Path(options.worker), all_checks)
    if options.rank:
        configure_training_runtime()
        from paddle_vl.doctor.ranks import run_rank

        return run_rank(Path(options.rank))
    if options.list:
        configure_runtime()
        from paddle_vl.doctor.check import all_checks

        for check in all_checks():
            note = "" if check.is_quick else "  (not with --quick)"
            print(f"{check.name:34}{check.title}{note}")
        return 0
    from paddle_vl.doctor.examination import examine

    file = None if options.json is None else Path(options.json)
    if file is not None and not file.resolve().parent.is_dir():
        raise ValueError(f"--json {file}: its folder does not exist; make it first")
    if int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1:
        raise ValueError(
            "paddle-vl doctor runs as one process and starts ranks itself: leave fleetrun out"
        )
    command = [sys.executable, "-u", str(_MAIN), "doctor", "--worker"]
    return examine(command, options.only, options.quick, file)


DOCTOR = Command(
    doctor,
    "check this installation on this machine, in about two minutes",
    "Check versions and flags, stored numbers of the original models, every kernel against the "
    "plain operation, and collectives and training on this machine's devices. Print a table and "
    "what to do about what is wrong.",
    _EPILOG,
    [
        value("--only", "NAME", "run these checks or groups alone", nargs="+", default=[]),
        switch("--quick", "small sizes, one process: about 20 seconds"),
        switch("--list", "list the checks and end"),
        value("--json", "FILE", "write all figures to this file"),
        value("--worker", "DIR", argparse.SUPPRESS),
        value("--rank", "FILE", argparse.SUPPRESS),
    ],
)
