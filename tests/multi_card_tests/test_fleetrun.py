"""A run on several ranks as the README starts it: `fleetrun ... tools/train.py CONFIG`.

Guarantee: Paddle's console script trains on two ranks, with one device's losses and weights.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.single_card_tests.train.tiny_run import write_tiny_run

ROOT = Path(__file__).parents[2]
FLEETRUN = Path(sys.executable).with_name("fleetrun")
TRAIN = str(ROOT / "tools" / "train.py")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("run"))


def trained(command: list[str], run_file: Path, output_dir: Path, *overrides: str) -> Path:
    environment = {name: value for name, value in os.environ.items() if name[:7] != "PADDLE_"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*command, str(run_file), f"train.output_dir={output_dir}", *overrides]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=output_dir.parent
    )
    logs = [path.read_text() for path in sorted((output_dir.parent / "log").glob("workerlog.*"))]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    return output_dir


def values(output_dir: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").open()]
    return [line[name] for line in lines if name in line]


def test_fleetrun_trains_what_one_process_trains(run_file, tmp_path):
    launcher = [str(FLEETRUN), "--nproc_per_node", "2", "--log_dir", str(tmp_path / "log"), TRAIN]
    two = trained(launcher, run_file, tmp_path / "two", "parallel.mp_degree=2")
    one = trained([sys.executable, TRAIN], run_file, tmp_path / "one")
    assert len(values(one, "loss")) > 1
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(values(two, name), values(one, name), rtol=1e-5)
    wanted = load_file(one / "final" / "model.safetensors")
    found = load_file(two / "final" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, atol=1e-5, err_msg=name)
