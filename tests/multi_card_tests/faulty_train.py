"""`tools/train.py` in which a rank may be killed or be given other settings, as variables say.

FAULT=RANK:PLACE kills that rank in the third training step (`step`), with the checkpoint of step 2
complete, or while the checkpoint of
step 4 is being written (`save`); FAULT=RANK:seed gives it another seed.
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


if int(rank) == int(os.environ["PADDLE_TRAINER_ID"]):
    if place == "seed":
        arguments.append("train.seed=6")
    elif place == "save":
        write_state = checkpoint.save_state
        checkpoint.save_state = lambda folder, state: (
            die() if state["step"] == 4 else write_state(folder, state)
        )
    elif place == "step":
        train_step, calls = trainer.train_step, []

        def third_time_lucky(*args):
            calls.append(1)
            return die_behind_checkpoint_2() if len(calls) == 3 else train_step(*args)

        trainer.train_step = third_time_lucky

run(arguments)
