"""`profile` on two ranks, as the command line starts it.

Guarantees: with dp and with a pipeline, the result covers both ranks, its
shares add up to 100 percent, and its step time is that of the slower rank; a pipeline reports
forward and backward as one phase, the other as two; a matrix runs the cells that fit and reports
only a cell above the memory limit as out of memory.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import ROOT

pytestmark = pytest.mark.heavy
STEPS = ["--nproc", "2", "--warmup", "1", "--steps", "2"]
TOPOLOGIES = {
    # --nproc alone is data parallel.
    "dp": [],
    "pipeline": ["parallel.pp_degree=2"],
}


def profile(run_file: Path, out: Path, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "tools" / "profile_step.py"), str(run_file)]
    done = subprocess.run(
        [*command, "--out", str(out), *STEPS, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_profile_has_both_processes(run_file, tmp_path, name):
    text = profile(run_file, tmp_path, *TOPOLOGIES[name])
    result = json.loads((tmp_path / "profile.json").read_text())
    assert result["num_processes"] == 2
    assert len(result["per_rank_phase_means_s"]) == len(result["per_rank_peak_alloc_gb"]) == 2
    assert result["global_step_time_s"] == max(result["per_rank_step_time_s"])
    assert sum(result["phase_shares_percent"].values()) == pytest.approx(100)
    phases = result["phase_shares_percent"].keys()
    if name == "pipeline":
        assert "forward_bwd" in phases
        assert not phases & {"forward", "bwd"}
    else:
        assert {"forward", "bwd", "gradient_sum"} <= phases
    # Two samples in each of two micro-batches, for each data-parallel rank.
    assert result["samples_per_step"] == (4 if name == "pipeline" else 8)
    assert "rank 1" in text


def test_matrix_runs_real_cells(run_file, tmp_path):
    text = profile(
        run_file, tmp_path, "--matrix", "--synthetic", "--sharding", "stage2", "--recompute",
        "none", "--batch-sizes", "1", "1024", "--answer-tokens", "100", "--memory-limit-gb", "0.5",
        "--image-side", "16", "train.gradient_accumulation_steps=1", "--repeats", "2",
    )  # fmt: skip
    cells = json.loads((tmp_path / "matrix.json").read_text())["cells"]
    assert [cell["status"] for cell in cells] == ["ok", "oom"]
    assert [len(cell["runs"]) for cell in cells] == [2, 0]
    assert "above the limit of 0.50 GB" in cells[1]["detail"]
    assert "**Recommended: stage2, recompute none, batch 1.**" in text
