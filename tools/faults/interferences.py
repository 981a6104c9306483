"""Faults that a run must survive: a pause, a second run in its folder, hostile data."""

import random
import signal
import time
from collections.abc import Sequence

from faults.fault import ALL_STARTS, SEVERAL_RANKS, Fault
from faults.moments import TooLateError
from faults.runs import NUM_RANKS, SignalledRun
from faults.tiny_run import NUM_STEPS

# Malformed lines of training data.
HOSTILE_LINES = (
    b"[" * 100_000,
    b'{"messages": ' * 20_000,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\xff\xfe\x00"}]}',
    b'{"messages": ' + b"9" * 10_000 + b"}",
    b'{"messages": [{"role": "user", "content": "<image>"}], "images": ["../../../etc/passwd"]}',
    b'{"messages": [{"role": "user", "content": "' + b"a" * 2_000_000 + b'"}]}',
    b"\x00\x00\x00",
)


class Pause(Fault):
    """A rank suspended for a while.

    Args:
        seconds: range from which the duration is drawn.
    """

    places = ("step", "write")
    goes_on = True
    codes = (0,)

    def __init__(
        self, name: str, sentence: str, seconds: tuple[float, float], starts: Sequence[str]
    ):
        self.name, self.sentence, self.starts = name, sentence, starts
        self._seconds = seconds

    def strike(self, run: SignalledRun, rng: random.Random) -> None:
        try:
            rank = run.rank(rng.randrange(NUM_RANKS[run.start]))
        except AssertionError:
            raise TooLateError from None
        rank.send_signal(signal.SIGSTOP)
        time.sleep(rng.uniform(*self._seconds))
        rank.send_signal(signal.SIGCONT)


class SecondRun(Fault):
    """The same command started again while the run is active."""

    name = "second-run"
    sentence = "the same command is started again while the first is held up, and has to be refused"
    starts = ("one", "nproc", "fleetrun")
    places = ("step", "write")
    goes_on = True
    codes = (0,)

    def strike(self, run: SignalledRun, rng: random.Random) -> list[str]:
        held_up = run.alive()
        for process in held_up:
            process.suspend()
        if run.last_step() == NUM_STEPS:
            # The run may have released the folder.
            for process in held_up:
                process.resume()
            raise TooLateError
        begin = time.monotonic()
        auto = ["train.resume_from_checkpoint=auto"]
        with run.again(run.output.with_suffix(".second"), auto) as second:
            ended = second.ended(begin)
        for process in held_up:
            process.resume()
        problems = []
        if ended.code == 0 or "is in use by" not in ended.output:
            problems.append(f"the second run was not refused: {ended.output[-2000:]}")
        if ended.left:
            problems.append(f"the second run left {ended.left}")
        return problems


class HostileLines(Fault):
    """Malformed lines in the training data."""

    name = "hostile-lines"
    sentence = "eight hostile lines in train.jsonl with on_bad_sample=skip, and a power loss on top"
    starts = ("one", "nproc")
    extra_lines = HOSTILE_LINES

    def strike(self, run: SignalledRun, rng: random.Random) -> None:
        run.kill_all()


SHORT_PAUSE = Pause(
    "pause-rank", "SIGSTOP to a rank, SIGCONT one to three seconds later", (1, 3), ALL_STARTS
)
# Longer than gloo's default timeout.
LONG_PAUSE = Pause(
    "long-pause", "SIGSTOP to a rank, SIGCONT 45 seconds later", (45, 45), SEVERAL_RANKS
)
INTERFERENCES = [SHORT_PAUSE, LONG_PAUSE, SecondRun(), HostileLines()]
