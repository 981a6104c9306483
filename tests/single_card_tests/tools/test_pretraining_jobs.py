"""The jobs of docs/pretraining.md: fleetrun lines and the slurm script.

Guarantees: every stage has lines for 1, 8 and 64 GPUs with valid settings, degrees that fit the
model and as many tokens per step; a wrong degree is named; the slurm script starts the line for 64
GPUs on every machine.
"""

import argparse
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from paddle_vl import Qwen3VLConfig
from paddle_vl.config.load import load_run_config
from paddle_vl.families.vlm.recipe import model_shape
from paddle_vl.families.vlm.settings import VLRun
from paddle_vl.parallel.degrees import TopologyPlan, plan_problems
from paddle_vl.train.layout import parallel_degrees

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "pretraining.md"
LINE = (
    "fleetrun --nproc_per_node 8 tools/train.py configs/qwen3_vl/pretrain_stage1_multimodal.yaml "
    "parallel.sharding_degree={} parallel.mp_degree={}"
)


class Job(NamedTuple):
    """A fleetrun line: its GPUs on all machines, and its settings with the line's overrides."""

    line: str
    gpus: int
    config: VLRun

    @classmethod
    def of(cls, line: str) -> "Job":
        """Parse a line as the launcher and tools/train.py do."""
        parser = argparse.ArgumentParser("fleetrun", exit_on_error=False)
        parser.add_argument("--nnodes", type=int, default=1)
        parser.add_argument("--nproc_per_node", type=int, required=True)
        parser.add_argument("--master")
        parser.add_argument("--log_dir")
        parser.add_argument("script")
        parser.add_argument("config")
        parser.add_argument("overrides", nargs="*")
        options = parser.parse_args(shlex.split(line)[1:])
        config = load_run_config(ROOT / options.config, options.overrides)
        assert isinstance(config, VLRun)
        return cls(line, options.nnodes * options.nproc_per_node, config)

    @property
    def tokens_per_step(self) -> int:
        """Places in the packed rows of a step."""
        train, data = self.config.train, self.config.data
        rows = self.config.parallel.data_degree * train.per_device_train_batch_size
        return rows * train.gradient_accumulation_steps * (data.packing_length or data.max_length)

    def problems(self) -> list[str]:
        """What is wrong with the degrees of parallelism, for the published size in the name of
        the model that it starts from."""
        found = re.search(r"qwen3[-_]vl[-_](\d+b)", (self.config.model.pretrained or "").lower())
        assert found, self.line
        shape = model_shape(Qwen3VLConfig.named(f"qwen3-vl-{found[1]}"))
        degrees, multiple = parallel_degrees(self.config), self.config.data.pad_to_multiple_of
        return plan_problems(TopologyPlan(degrees, self.gpus, shape, multiple))


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """The fleetrun lines in the code blocks of the page; a backslash continues a line."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [Job.of(" ".join(line.split())) for line in lines if line.startswith("fleetrun ")]


def test_every_stage_has_lines_that_fit_their_gpus(jobs):
    stages = {path.name for path in (ROOT / "configs/qwen3_vl").glob("pretrain_*.yaml")}
    assert len(stages) == 4
    for stage in stages:
        lines = [job for job in jobs if stage in job.line]
        # The last stage has a second line for eight, with context parallelism.
        assert [job.gpus for job in lines] == [1, 8, 64] + [8] * ("stage3" in stage), stage
        assert len({job.tokens_per_step for job in lines}) == 1, stage
        assert not any(job.problems() for job in lines)


def test_each_stage_starts_from_the_final_model_of_the_one_before(jobs):
    for gpus in (1, 8, 64):
        runs = [
            job.config for job in jobs
            if job.gpus == gpus and job.config.parallel.cp_degree == 1
        ]  # fmt: skip
        wanted = [f"{run.train.output_dir}/final" for run in runs[:-1]]
        assert [run.model.pretrained for run in runs[1:]] == wanted


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
