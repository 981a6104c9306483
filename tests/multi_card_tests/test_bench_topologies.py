"""The tool that compares the performance of two checkouts.

Guarantees: a rank's step is timed and its traffic counted; both checkouts run in every round, in
changing order, and equal ones have ratios of one; a folder that is not a checkout is refused.
"""

import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

import topologies
from tests.support import forked

ROOT = Path(__file__).parents[2]


def bench(*options: str) -> subprocess.CompletedProcess:
    return forked.run([str(ROOT / "tools" / "benchmarks" / "topologies.py"), *options])


@pytest.mark.heavy
def test_a_topology_is_measured():
    few = ("--families", "pi07", "--topologies", "dp2", "--steps", "1", "--rounds", "1")
    done = bench(*few)
    assert done.returncode == 0, done.stderr
    heads, found = (line.split() for line in done.stdout.splitlines())
    assert heads[-2:] == ["peak", "MiB"]
    assert found[:2] == ["pi07", "dp2"]
    assert float(found[2]) > 0
    # dp alone sums gradients, and sends no messages.
    assert [int(found[3]) > 0, int(found[4])] == [True, 0]
    assert float(found[5]) > 0


def test_both_checkouts_run_in_every_round(tmp_path, monkeypatch):
    ran = []

    def trained(family, topology, package, folder, steps):
        ran.append(package)
        return dict.fromkeys(topologies.MEASURES, 2e6)

    monkeypatch.setattr(topologies, "trained", trained)
    monkeypatch.setattr(topologies.harness, "make_data", lambda family, folder: None)
    given = Namespace(against=tmp_path, families=["pi07"], topologies=["dp2"], steps=1, rounds=2)
    (table,) = topologies.compare(given, tmp_path).tables
    assert ran == [ROOT, tmp_path, tmp_path, ROOT]
    here, there, ratio = table.rows
    assert (here[0], there[0]) == ("pi07 dp2 here", "pi07 dp2 there")
    assert here[1:] == there[1:]
    assert ratio == ["pi07 dp2 ratio", "1.000", *["1.00"] * 4]


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    done = bench("--against", str(tmp_path))
    assert done.returncode == 2
    assert "is no checkout: it has no paddle_vl/" in done.stderr
