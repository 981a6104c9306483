"""The tool that compares the performance of two checkouts.

Guarantees: it runs both; a checkout compared with itself has equal traffic; a folder that is not a
checkout is refused.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def bench(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools" / "benchmarks" / "topologies.py"), *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_checkout_sends_what_it_sends():
    few = ("--families", "pi07", "--topologies", "dp2", "--steps", "1", "--rounds", "1")
    done = bench(*few, "--against", str(ROOT))
    assert done.returncode == 0, done.stderr
    heads, here, there, ratio = (line.split() for line in done.stdout.splitlines())
    assert heads[-2:] == ["peak", "MiB"]
    assert (here[:3], there[:3]) == (["pi07", "dp2", "here"], ["pi07", "dp2", "there"])
    assert float(here[3]) > 0
    assert int(here[4]) > 0
    assert here[4:7] == there[4:7]
    assert ratio[2:3] + ratio[4:5] + ratio[6:7] == ["ratio", "1.00", "1.00"]


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    done = bench("--against", str(tmp_path))
    assert done.returncode == 2
    assert "is no checkout: it has no paddle_vl/" in done.stderr
