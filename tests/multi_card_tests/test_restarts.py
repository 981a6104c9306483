"""`--max_restarts`: a run restarts by itself after a rank has died.

Guarantees: it restarts from the newest checkpoint, on fewer ranks if allowed, and gives the results
of an undisturbed run; a run that never reached a step is not restarted.
"""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.config.load import load_run_config
from paddle_vl.train.reporting.run_files import read_starts
from paddle_vl.train.restarts import degrees_with_fewer_ranks
from signalled_runs import ROOT, SignalledRun
from tests.support.topology_runs import train


def test_a_run_goes_on_with_fewer_ranks_to_the_same_numbers(run_file, tmp_path):
    steps = ("train.max_steps=40", "train.save_steps=2", "train.save_total_limit=2")
    restarts = ("--max_restarts", "2", "--min_nproc", "1")
    with SignalledRun("nproc", run_file, tmp_path / "out", [*steps, *restarts]) as run:
        run.wait_for_steps(5)
        # A background thread writes checkpoints.
        while not list((tmp_path / "out").glob("checkpoint-*")):
            assert run.process.poll() is None
            time.sleep(0.01)
        run.rank(1).kill()
        assert run.process.wait(300) == 0, (tmp_path / "out.out").read_text()
    said = (tmp_path / "out.out").read_text()
    assert "rank 1 was killed by SIGKILL" in said
    assert "start 1 of 2 again, with 1 ranks" in said
    first, second = read_starts(tmp_path / "out")
    assert (first["num_processes"], second["num_processes"]) == (2, 1)
    assert second["first_step"] >= 2
    given = ["--max_restarts", "2", "--min_nproc", "1"]
    assert first["command"] == second["command"]
    assert [*first["command"][:4], *first["command"][-4:]] == [
        *(sys.executable, "-m", "paddle_vl", "train"), *given
    ]  # fmt: skip
    whole = tmp_path / "whole"
    train(run_file, whole, [*steps, "train.per_device_train_batch_size=4"])
    wanted = load_file(whole / "final" / "model.safetensors")
    for name, array in load_file(tmp_path / "out" / "final" / "model.safetensors").items():
        np.testing.assert_allclose(array, wanted[name], rtol=0, atol=1e-5, err_msg=name)


def test_a_run_that_reached_no_step_is_not_started_again(run_file, tmp_path):
    command = [sys.executable, "-m", "paddle_vl", "train", "--nproc", "2", "--max_restarts", "3"]
    command += [str(run_file), f"train.output_dir={tmp_path / 'out'}", "parallel.dp_degree=2"]
    command += ["model.config.text_config.num_hidden_layers=many"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.count("no step was reached, so the run is not started again") == 1


@pytest.mark.parametrize(
    ("degrees", "num_ranks", "fewest", "wanted"),
    [
        ({"dp_degree": 4}, 4, 1, (2, {"dp_degree": 2, "sharding_degree": 1, "batch": 4})),
        ({"dp_degree": 4}, 4, 3, None),
        ({"sharding_degree": 2, "dp_degree": 2}, 4, 2,
         (2, {"dp_degree": 1, "sharding_degree": 2, "batch": 4})),
        ({"mp_degree": 2, "dp_degree": 2}, 4, 1,
         (2, {"dp_degree": 1, "sharding_degree": 1, "batch": 4})),
        ({"mp_degree": 2}, 2, 1, None),
        # Of two groups of context parallelism one is left.
        ({"sharding_degree": 4, "cp_degree": 2}, 4, 1,
         (2, {"dp_degree": 1, "sharding_degree": 2, "batch": 4})),
    ],
)  # fmt: skip
def test_fewer_ranks_keep_the_samples_of_a_micro_batch(
    run_file, degrees, num_ranks, fewest, wanted
):
    overrides = [f"parallel.{name}={degree}" for name, degree in degrees.items()]
    config = load_run_config(run_file, overrides)
    found = degrees_with_fewer_ranks(config, num_ranks, fewest)
    if wanted is None:
        assert found is None
        return
    size, settings = wanted
    assert found == (
        size,
        {
            "parallel.dp_degree": settings["dp_degree"],
            "parallel.sharding_degree": settings["sharding_degree"],
            "train.per_device_train_batch_size": settings["batch"],
        },
    )
