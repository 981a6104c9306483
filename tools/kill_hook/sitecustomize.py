"""A kill from inside a rank. Python imports this file at its start if this folder is in PYTHONPATH.

FAULT_RANK      PADDLE_TRAINER_ID of the rank, empty without ranks
FAULT_CALLS     number of a rename or removal of a folder, from 0, at which the rank is killed; of
                those whose paths contain FAULT_PATH
"""

import os
import signal
import sys


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
    kill_at(int(os.environ["FAULT_CALLS"]), os.environ["FAULT_PATH"])
