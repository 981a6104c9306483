"""`tools/train.py` with a fault in one rank.

FAULT=RANK:PLACE names the rank and the fault:

- `step`: SIGKILL in the third training step, after the checkpoint of step 2 is complete;
- `save`: SIGKILL while the checkpoint of step 4 is being written;
- `seed`: another seed than the other ranks;
- `raise`: an exception in the third step;
- `late`: the data of the second step come later than gloo's 30 seconds;
- `stuck`: a blocking call in the third step that never returns, as NCCL calls do.
"""

import os
import signal
import sys
import time
from pathlib import Path

from paddle_vl.cli.main import run
from paddle_vl.train import checkpoint, trainer
from paddle_vl.train.feeding.feed import BatchFeed

rank, _, place = os.environ.get("FAULT", "-1:").partition(":")
arguments = ["train", *sys.argv[1:]]


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def die_behind_checkpoint_2():
    """Wait for checkpoint 2, which a background thread writes, and die."""
    (output_dir,) = (a.partition("=")[2] for a in arguments if a.startswith("train.output_dir="))
    while not (Path(output_dir) / "checkpoint-2").exists():
        time.sleep(0.01)
    die()


def fail():
    raise KeyError("no such sample")


# Longer than gloo waits.
LATE_S = 33
IN_STEP = {
    "step": die_behind_checkpoint_2,
    "raise": fail,
    "stuck": lambda: os.read(os.pipe()[0], 1),
}

if int(rank) == int(os.environ["PADDLE_TRAINER_ID"]):
    if place == "seed":
        arguments.append("train.seed=6")
    elif place == "save":
        write_state = checkpoint.save_state
        checkpoint.save_state = lambda folder, state: (
            die() if state["step"] == 4 else write_state(folder, state)
        )
    elif place == "late":
        fetch = BatchFeed._fetch

        def fetch_late(feed, is_ahead):
            time.sleep(LATE_S if feed.steps_fed == 1 else 0)
            return fetch(feed, is_ahead)

        BatchFeed._fetch = fetch_late
    elif place in IN_STEP:
        train_step, calls = trainer.train_step, []

        def third_time_lucky(*args):
            calls.append(1)
            return IN_STEP[place]() if len(calls) == 3 else train_step(*args)

        trainer.train_step = third_time_lucky

run(arguments)
