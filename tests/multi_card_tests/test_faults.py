"""Runs on several ranks in which one rank dies or has other settings.

Guarantees:

- the launcher ends the other ranks with a nonzero exit code;
- the last checkpoint is complete, and the run continues from it bit-exactly, wherever it was
  interrupted;
- a rank that is later for a step than gloo's own 30 seconds changes no bit of the result;
- the last line that one reads is the first error with the path of its log, which has its traceback;
- ranks that disagree on a setting stop at the start and name it;
- without a launcher that would kill them, ranks end by themselves after another rank failed, and
  log the reason, even from a blocking wait.
"""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.parallel import launcher
from tests.support import forked
from tests.support.forked import ROOT
from tests.support.launch import rank_environment, reserve_port

SCRIPT = Path(__file__).with_name("faulty_train.py")
# Start-up on a loaded machine, a few steps, and the end; far below parallel.timeout_s.
SECONDS_TO_END = 300


MP2 = ("parallel.mp_degree=2", "train.save_steps=2", "train.resume_from_checkpoint=auto")


def launched(run_file: Path, output_dir: Path, fault: str) -> tuple[int, str]:
    """Run on two mp ranks through the launcher: its exit code and output."""
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2"]
    command += ["--log_dir", str(output_dir) + "-log", str(SCRIPT), str(run_file)]
    command += [f"train.output_dir={output_dir}", *MP2]
    environment = {name: value for name, value in os.environ.items() if name[:7] != "PADDLE_"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FAULT": fault}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(
        command, **both, env=environment, cwd=output_dir.parent, timeout=SECONDS_TO_END
    )
    return done.returncode, done.stdout


def started_alone(run_file: Path, output_dir: Path, faults: Sequence[str], *overrides: str):
    """Two ranks without a launcher that ends both: exit codes and outputs by rank."""
    output_dir.parent.mkdir(exist_ok=True)
    outputs = [output_dir.with_name(f"{output_dir.name}-{rank}.log") for rank in range(2)]
    command = [str(SCRIPT), str(run_file), f"train.output_dir={output_dir}", *overrides]
    with ExitStack() as stack:
        ports = [reserve_port(stack) for _ in faults]
        processes = []
        for rank, fault in enumerate(faults):
            environment = rank_environment(rank, ports) | {"FAULT": f"{rank}:{fault}"}
            environment["PADDLE_MASTER"] = environment["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
            process = forked.start(command, environment=environment, stdout=outputs[rank])
            stack.callback(process.kill)
            processes.append(process)
        codes = [process.wait(SECONDS_TO_END) for process in processes]
        return codes, [output.read_text() for output in outputs]


@pytest.fixture(scope="module")
def whole(run_file, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("whole") / "out"
    codes, outputs = started_alone(run_file, output_dir, ("none", "none"), *MP2)
    assert codes == [0, 0], outputs
    return output_dir


def assert_same_end(output_dir: Path, whole: Path) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        wanted = load_file(whole / "checkpoint-4" / name)
        for key, array in load_file(output_dir / "checkpoint-4" / name).items():
            np.testing.assert_array_equal(array, wanted[key], err_msg=key)


@pytest.mark.parametrize("is_launched", [pytest.param(True, marks=pytest.mark.heavy), False])
def test_a_killed_rank_ends_the_run_and_the_last_checkpoint_continues(
    run_file, whole, tmp_path, is_launched
):
    output_dir = tmp_path / "out"
    if is_launched:
        assert launched(run_file, output_dir, "1:step")[0] != 0
    else:
        codes, outputs = started_alone(run_file, output_dir, ("save", "none"), *MP2)
        assert 0 not in codes, outputs
    complete = sorted(path.name for path in output_dir.glob("checkpoint-*"))
    assert complete == ["checkpoint-2"]
    codes, outputs = started_alone(run_file, output_dir, ("none", "none"), *MP2)
    assert codes == [0, 0], outputs
    assert_same_end(output_dir, whole)
    assert not list(output_dir.glob(".partial*"))


@pytest.mark.heavy
def test_a_rank_that_is_late_changes_nothing(run_file, whole, tmp_path):
    codes, outputs = started_alone(run_file, tmp_path / "out", ("late", "none"), *MP2)
    assert codes == [0, 0], outputs
    assert_same_end(tmp_path / "out", whole)


FAILS_FIRST = """
import os, time
from paddle_vl.cli import main

def failing(arguments):
    if os.environ["PADDLE_TRAINER_ID"] != os.environ["FAILING"]:
        while not os.path.exists(os.environ["FAILS"]):
            time.sleep(0.05)
        time.sleep(1)
        raise ValueError("another rank has ended")
    open(os.environ["FAILS"], "w").close()
    if os.environ["ERROR"] == "of users":
        with open("no-such-file"):
            pass
    if os.environ["ERROR"] == "exit":
        os._exit(3)
    raise OSError(os.environ["ERROR"])

main.main = failing
main.run([])
"""
# As Paddle 3.3 raises what a hand-written operation raises in a backward pass.
OF_PADDLE = """(External) \n{
    ======== Error message in backward of GradNodePyLayer__Attention(0x5636fd8c36e0) ========
    OSError: (External) \n    {
        RuntimeError: (PermissionDenied) Null pointer error, the impl_ should not be Null.
          [Hint: impl_ should not be null.] (at /paddle/paddle/phi/api/lib/tensor.cc:162)

        At:
          creation.py(3371): empty_like
    }
     (at /paddle/paddle/fluid/eager/pylayer/py_layer_node.cc:177)
}
 (at /paddle/paddle/fluid/eager/pylayer/py_layer_node.cc:177)
"""
NULL = "RuntimeError: (PermissionDenied) Null pointer error, the impl_ should not be Null."
MISSING = "[Errno 2] No such file or directory: 'no-such-file'"


@pytest.mark.parametrize(
    ("failing", "error", "said"),
    [
        (0, OF_PADDLE, f"failed: {NULL}"),
        (1, OF_PADDLE, f"failed: {NULL}"),
        (1, "of users", f"failed: {MISSING}"),
        (0, "exit", "ended with exit code 3"),
    ],
)
def test_a_failed_rank_is_one_line_with_its_error_and_its_log(
    failing, error, said, tmp_path, monkeypatch, caplog, capfd
):
    (tmp_path / "main.py").write_text(FAILS_FIRST)
    monkeypatch.setattr(launcher, "_MAIN", tmp_path / "main.py")
    monkeypatch.setattr(logging.getLogger(), "handlers", [caplog.handler])
    variables = {"FAILING": failing, "FAILS": tmp_path / "fails", "ERROR": error}
    for name, value in {**variables, "PYTHONPATH": ROOT}.items():
        monkeypatch.setenv(name, str(value))
    assert launcher.launch([], 2, tmp_path / "log") == (3 if error == "exit" else 1)
    log = tmp_path / "log" / f"workerlog.{failing}"
    line = f"rank {failing} {said}; its log is {log}"
    assert [record.getMessage() for record in caplog.records] == [line]
    # Rank 0 has written nothing to the terminal.
    assert capfd.readouterr() == ("", "")
    if error == OF_PADDLE:
        assert "Traceback (most recent call last)" in log.read_text()


@pytest.mark.heavy
def test_the_last_line_of_fleetrun_is_the_first_error_and_its_log(run_file, tmp_path):
    code, output = launched(run_file, tmp_path / "out", "1:raise")
    assert code != 0, output
    *_, error, end = output.splitlines()
    log = f"{tmp_path}/out-log/workerlog.1"
    assert error == f"rank 1 failed: KeyError: 'no such sample'; its log is {log}", output
    assert "Exit code 1" in end


def test_ranks_that_disagree_stop_at_the_start_and_name_the_setting(run_file, tmp_path):
    codes, outputs = started_alone(run_file, tmp_path / "out", ("none", "seed"), *MP2)
    assert codes == [1, 1]
    for rank, output in enumerate(outputs):
        assert "do not have the same" in output
        assert f"rank {rank} (mp {rank}): the ranks" in output
        assert "train.seed (rank 0 5, rank 1 6)" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.heavy), 1])
def test_a_rank_that_is_stuck_ends_soon_after_another_has_failed(run_file, tmp_path, failing):
    faults = ("raise", "stuck") if failing == 0 else ("stuck", "raise")
    codes, outputs = started_alone(run_file, tmp_path / "out", faults, "parallel.dp_degree=2")
    assert codes == [1, 1]
    assert "KeyError: 'no such sample'" in outputs[failing]
    said = outputs[1 - failing]
    # The store ends soon after rank 0.
    problem = (
        "(failed with KeyError: .no such sample.|has ended)" if failing == 0 else "failed with"
    )
    assert re.search(f"rank {1 - failing}: rank {failing} {problem}", said)
    assert "has not come back for 10 s from" in said
    assert "train.resume_from_checkpoint=auto" in said


def test_a_rank_in_gloo_ends_at_once_after_another_has_failed(run_file, tmp_path):
    faults = ("none", "raise")
    codes, outputs = started_alone(run_file, tmp_path / "out", faults, "parallel.dp_degree=2")
    assert codes == [1, 1]
    told = (
        "a collective failed: rank 1 failed with KeyError: 'no such sample'; see the log of rank 1"
    )
    assert told in outputs[0]
    # The collective raised; the watchdog did not have to end the rank.
    assert "has not come back for" not in outputs[0]
