"""The jobs of docs/pretraining.md: fleetrun lines, their memory, and the slurm script.

Guarantees: every stage has lines for 1, 8 and 64 GPUs with valid settings, degrees that fit the
model and as many tokens per step; the page has the table of their memory; a wrong degree is named;
the slurm script starts the line for 64 GPUs on every machine.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from pretraining_jobs import MARKS, PAGE, ROOT, Job, jobs_of, table_of

LINE = (
    "fleetrun --nproc_per_node 8 tools/train.py configs/qwen3_vl/pretrain_stage1_multimodal.yaml "
    "parallel.sharding_degree={} parallel.mp_degree={}"
)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return list(jobs_of(PAGE.read_text(encoding="utf-8")))


def test_every_stage_has_lines_that_fit_their_gpus(jobs):
    stages = {path.name for path in (ROOT / "configs/qwen3_vl").glob("pretrain_*.yaml")}
    assert len(stages) == 4
    for stage in stages:
        lines = [job for job in jobs if stage in job.line]
        assert [job.gpus for job in lines] == [1, 8, 64], stage
        assert len({job.tokens_per_step for job in lines}) == 1, stage
        assert [job.problems() for job in lines] == [[], [], []]


def test_each_stage_starts_from_the_final_model_of_the_one_before(jobs):
    for gpus in (1, 8, 64):
        runs = [job.config for job in jobs if job.gpus == gpus]
        wanted = [f"{run.train.output_dir}/final" for run in runs[:-1]]
        assert [run.model.pretrained for run in runs[1:]] == wanted


def test_the_page_has_the_table(jobs):
    page = PAGE.read_text(encoding="utf-8")
    found = page.split(MARKS[0])[1].split(MARKS[1])[0]
    assert "\n".join(table_of(jobs)) in found


def test_memory_follows_the_layout():
    """Full training of 8.77 billion parameters; a tower of 0.58 billion is not divided by mp."""
    whole, split = (Job.of(LINE.format(*degrees)).memory() for degrees in ((8, 1), (2, 4)))
    assert whole["weights"] == pytest.approx(2 * 8.767, rel=1e-3)
    assert whole["AdamW"] == pytest.approx(12 * 8.767 / 8, rel=1e-3)
    assert split["weights"] == pytest.approx(2 * (8.19 / 4 + 0.576), rel=1e-2)
    # A chunk of 2^27 logits in both; a head of 151,936 rows of 4,096, divided by mp.
    chunk, head = 10 * 2**27 / 1e9, 4 * 151936 * 4096 / 1e9
    assert whole["loss"] == pytest.approx(chunk + head)
    assert split["loss"] == pytest.approx(chunk + head / 4)


def test_degrees_that_do_not_fit_are_named():
    problems = Job.of(LINE.format(2, 3)).problems()
    assert any("but the run has 8 ranks" in problem for problem in problems)
    assert any("mp_degree 3" in problem for problem in problems[1:])


def test_the_slurm_script_starts_a_line_on_every_machine(jobs, tmp_path):
    line = next(job for job in jobs if job.gpus == 64 and "stage1" in job.line)
    arguments = shlex.split(line.line.partition("tools/train.py ")[2])
    # Two programs of slurm, and a launcher that prints its command line.
    programs = {
        "bin/scontrol": 'echo "node07"; echo "node08"',
        "bin/srun": 'while [ $1 != bash ]; do shift; done; SLURM_NODEID=1 exec "$@"',
        ".venv/bin/fleetrun": 'printf "%q " fleetrun "$@"',
    }
    for name, body in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_NNODES": "8",
        "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "41234",
        "SLURM_JOB_NODELIST": "node[07-08]",
    }  # fmt: skip
    script = ["bash", str(ROOT / "configs/qwen3_vl/pretrain.slurm"), *arguments]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "--master node07:21234 " in done.stdout
    assert "--rank 1 " in done.stdout
    assert "--log_dir runs/slurm/41234/1 " in done.stdout
    found = Job.of(done.stdout.replace("--rank 1 ", ""))
    assert (found.gpus, found.config) == (64, line.config)
    wrong = subprocess.run(script[:2], capture_output=True, text=True, env=environment, cwd="/")
    assert wrong.returncode == 2
    assert "usage: sbatch" in wrong.stderr


def test_the_page_names_every_stage():
    text = Path(PAGE).read_text(encoding="utf-8")
    for path in (ROOT / "configs/qwen3_vl").glob("pretrain*"):
        assert f"configs/qwen3_vl/{path.name}" in text
