"""A worker of `paddle-vl doctor` whose checks have faults; started by its tests as a process.

python doctor_faults.py FAULTS DIR      names of `FAULTS`, separated by commas
"""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from paddle_vl.doctor.check import Check, Machine, Result, ok
from paddle_vl.doctor.examination import run_checks

CHILD_FILE = "child"
# Variable with the device of the machine that the checks are told of.
DEVICE = "DOCTOR_TEST_DEVICE"


def segfault(machine: Machine) -> Result:
    ctypes.string_at(0)
    return ok("not reached")


def hang(machine: Machine) -> Result:
    # With a process of its own, as the launcher's ranks are.
    child = subprocess.Popen(["sleep", "600"])
    (machine.folder.parent / CHILD_FILE).write_text(str(child.pid))
    time.sleep(600)
    return ok("not reached")


def error(machine: Machine) -> Result:
    raise RuntimeError("no kernel for this device")


def leave(machine: Machine) -> Result:
    os._exit(3)


def end_well(machine: Machine) -> Result:
    os._exit(0)


def fine(machine: Machine) -> Result:
    return ok("fine", value=float("nan"), process=os.getpid())


FAULTS = {
    "segfault": segfault, "hang": hang, "error": error, "leave": leave, "end": end_well,
    "fine": fine,
}  # fmt: skip


def machine_without_paddle(is_quick: bool, folder: Path) -> Machine:
    device = os.environ.get(DEVICE, "cpu")
    return Machine("gpu" if device == "gpu" else "cpu", 0, False, is_quick, folder)


def main() -> None:
    names, folder = sys.argv[1].split(","), Path(sys.argv[2])
    if names == ["import"]:
        raise ImportError("libcudnn.so.9: cannot open shared object file")
    checks = [
        Check(f"{name}.{number}", name, FAULTS[name], limit_s=1.0)
        for number, name in enumerate(names)
    ]
    # Paddle has handlers of its own for crashes; its import takes a second.
    machine = None if "segfault" in names else machine_without_paddle
    run_checks(folder, lambda: checks, machine)


if __name__ == "__main__":
    main()
