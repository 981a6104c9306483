"""A training run that is killed, with KILLED=1, while a file of checkpoint-4 is half written.

    python killed_save.py CONFIG [section.name=value ...]

The disk is so slow that the next step has completed by then.
"""

import os
import signal
import sys
import time

from paddle_vl.checkpoint.manifest import SummedStream
from paddle_vl.config.load import load_run_config
from paddle_vl.train.build import build_trainer

plain = SummedStream.write
trainer = build_trainer(load_run_config(sys.argv[1], sys.argv[2:]))


def write(stream, data, *arguments):
    if ".partial-checkpoint-4/optimizer" in stream._stream.name:
        while trainer.step < 5:
            time.sleep(0.01)
        stream._stream.write(memoryview(data).cast("B")[: len(data) // 2])
        stream._stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    plain(stream, data, *arguments)


if os.environ["KILLED"] == "1":
    SummedStream.write = write
trainer.run()
