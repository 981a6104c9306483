"""The benchmark of the colocated schedule.

Guarantees: it runs the three sides; each encodes every image once in the world; the colocated side
has the most even work, and the only traffic over the bridge; none copies to the device besides its
batches.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.heavy
def test_every_side_encodes_each_image_once():
    command = [sys.executable, str(ROOT / "tools" / "benchmarks" / "colocated.py")]
    command += ["--shares", "50", "--steps", "1", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, *lines = done.stdout.splitlines()[:4]
    found = {line.split(",")[1].split()[0]: line.split(",")[1].split()[1:] for line in lines}
    assert list(found) == ["count", "cost", "colocated"]
    assert [cells[3] for cells in found.values()] == ["1.00"] * 3
    busiest = {side: float(cells[2]) for side, cells in found.items()}
    assert busiest["colocated"] < min(busiest["count"], busiest["cost"])
    assert [float(cells[4]) > 0 for cells in found.values()] == [False, False, True]
    assert [cells[6] for cells in found.values()] == ["0"] * 3
