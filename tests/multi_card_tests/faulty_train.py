"""`tools/train.py` in which a rank may be killed or be given other settings, as variables say.

FAULT=RANK:PLACE kills that rank in the third training step (`step`), with the checkpoint of step 2
complete, or while the checkpoint of
step 4 is being written (`save`); FAULT=RANK:seed gives it another seed. In the third step
FAULT=RANK:raise raises, and FAULT=RANK:stuck waits for ever in a call that notices nothing, as one
of NCCL does.
"""

import os
import signal
import sys
import time
from pathlib import Path

from paddle_vl.cli.main import run
from paddle_vl.train import checkpoint, trainer

rank, _, place = os.environ.get("FAULT", "-1:").partition(":")
arguments = ["train", *sys.argv[1:]]


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def die_behind_checkpoint_2():
    """Checkpoints are written beside training."""
    (output_dir,) = (a.partition("=")[2] for a in arguments if a.startswith("train.output_dir="))
    while not (Path(output_dir) / "checkpoint-2").exists():
        time.sleep(0.01)
    die()


def fail():
    raise KeyError("no such sample")


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
    elif place in IN_STEP:
        train_step, calls = trainer.train_step, []

        def third_time_lucky(*args):
            calls.append(1)
            return IN_STEP[place]() if len(calls) == 3 else train_step(*args)

        trainer.train_step = third_time_lucky

run(arguments)
