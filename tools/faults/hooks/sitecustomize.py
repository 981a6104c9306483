"""Faults from inside a rank. Python imports this file at its start if this folder is in PYTHONPATH.

FAULT_RANK      PADDLE_TRAINER_ID of the rank, empty without ranks
FAULT_THREAD    begin of the name of a thread: its next call of a function of the package raises,
                once the file FAULT_FILE exists; FAULT_FILE.died says that it has
FAULT_CALLS     number of a rename or removal of a folder, from 0, at which the rank is killed; of
                those whose paths contain FAULT_PATH
"""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

MESSAGE = "a failure injected by the campaign"


def fail_in_thread(name: str, file: str) -> None:
    """Raise in the functions of the package that a thread calls."""

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code.co_filename
        if event != "call" or "/paddle_vl/" not in code or code.endswith("threads.py"):
            return
        if threading.current_thread().name.startswith(name) and os.path.exists(file):
            sys.setprofile(None)
            with open(f"{file}.died", "w"):
                raise RuntimeError(MESSAGE)

    threading.setprofile(on_event)


def kill_at(number: int, path: str) -> None:
    """Kill this process at one of its renames and removals."""
    seen = 0

    def on_event(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event in ("os.rename", "shutil.rmtree") and path in " ".join(map(str, arguments)):
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(on_event)


is_rank = os.environ.get("PADDLE_TRAINER_ID", "") == os.environ["FAULT_RANK"]
if is_rank and "multiprocessing" not in " ".join(sys.orig_argv):
    if "FAULT_THREAD" in os.environ:
        fail_in_thread(os.environ["FAULT_THREAD"], os.environ["FAULT_FILE"])
    if "FAULT_CALLS" in os.environ:
        kill_at(int(os.environ["FAULT_CALLS"]), os.environ["FAULT_PATH"])
