"""Damage to the newest checkpoint of a run that ended; the run must resume from the one before."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from faults.fault import Damage
from faults.kills import PowerLoss
from faults.moments import TooLateError
from faults.runs import SignalledRun
from faults.tiny_run import NUM_STEPS, SAVE_STEPS
from faults.verdict import checkpoint_steps

MANIFEST = "manifest.json"
STATE = "trainer_state.json"


class DamagedCheckpoint(PowerLoss):
    """Power loss, then damage to one file of the newest checkpoint."""

    starts: Sequence[str] = ("one", "nproc", "nproc4")
    places = ("step",)
    # Two checkpoints exist from this step on.
    steps = range(2 * SAVE_STEPS, NUM_STEPS - 1)

    def __init__(
        self, name: str, sentence: str, file: str, alter: Callable[[Path, random.Random], str]
    ):
        self.name, self._file, self._alter = f"damage-{name}", file, alter
        self.sentence = f"{sentence} in the newest checkpoint, after a power loss"

    def strike(self, run: SignalledRun, rng: random.Random) -> None:
        # Checkpoints are written asynchronously.
        while len(checkpoint_steps(run.output_dir)) < 2:
            if run.process.poll() is not None:
                raise TooLateError
            time.sleep(0.002)
        run.kill_all()

    def damage(self, output_dir: Path, rng: random.Random) -> Damage:
        step = max(checkpoint_steps(output_dir))
        newest = output_dir / f"checkpoint-{step}"
        files = sorted(path for path in newest.rglob(self._file) if path.stat().st_size)
        file = rng.choice(files)
        said = self._alter(file, rng)
        return Damage(
            checkpoint=step,
            what=f"{newest.name}/{file.name} {said}",
            mentioned=(newest.name,),
        )


def delete(file: Path, rng: random.Random) -> str:
    file.unlink()
    return "deleted"


def truncate(file: Path, rng: random.Random) -> str:
    size = rng.randrange(1, file.stat().st_size)
    with file.open("r+b") as stream:
        stream.truncate(size)
    return f"cut to {size} bytes"


def empty(file: Path, rng: random.Random) -> str:
    file.write_bytes(b"")
    return "emptied"


def flip(file: Path, rng: random.Random) -> str:
    content = bytearray(file.read_bytes())
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {place} flipped"


DAMAGES = [
    DamagedCheckpoint("delete", "weights or optimizer state deleted", "*.safetensors", delete),
    DamagedCheckpoint("truncate", "weights or optimizer cut short", "*.safetensors", truncate),
    DamagedCheckpoint("empty", "weights or optimizer state emptied", "*.safetensors", empty),
    DamagedCheckpoint("flip", "a bit of weights or optimizer state flipped", "*.safetensors", flip),
    DamagedCheckpoint("flip-state", "a bit of trainer_state.json flipped", STATE, flip),
    DamagedCheckpoint("truncate-state", "trainer_state.json cut short", STATE, truncate),
    DamagedCheckpoint("flip-manifest", "a bit of manifest.json flipped", MANIFEST, flip),
    DamagedCheckpoint("truncate-manifest", "manifest.json cut short", MANIFEST, truncate),
]
