"""Runs that get a signal to stop, and runs whose launcher is killed.

Guarantees, whether the command, its process group, the launcher or one rank gets the signal, once
or in a burst: the current step ends, its checkpoint is complete, the exit code is that of the
signal, and no process is left, data workers included; a second signal ends the run at once. Runs
start as users start them.
"""

import signal
import subprocess
import time

import psutil
import pytest

from signalled_runs import ENDLESS, SignalledRun

INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
WORKERS = ("data.num_workers=1",)
SAVED = {
    "Ctrl-C with data workers": ("one", INT, "group", 1, WORKERS, 130),
    "Ctrl-C in the terminal of --nproc": ("nproc", INT, "group", 1, WORKERS, 130),
    "SIGTERM in a burst to --nproc": ("nproc", TERM, "command", 3, (), 143),
    "SIGTERM to the launcher of fleetrun": ("fleetrun", TERM, "command", 1, WORKERS, 15),
    "SIGTERM to one rank of fleetrun": ("fleetrun", TERM, "rank 1", 1, (), 143),
}
HEAVY = [case for case in SAVED if case != "Ctrl-C in the terminal of --nproc"]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.heavy] * (case in HEAVY)) for case in SAVED]
)
def test_a_request_to_stop_saves_the_step_in_progress(run_file, tmp_path, case):
    start, number, target, times, overrides, code = SAVED[case]
    with SignalledRun(start, run_file, tmp_path / "out", [*ENDLESS, *overrides]) as run:
        run.wait_for_steps()
        ended = run.signal(number, target, times)
    assert ended.code == code, ended.output
    assert ended.left == []
    assert ended.checkpoints == [f"checkpoint-{ended.last_step}"], ended.output


@pytest.mark.heavy
@pytest.mark.parametrize("start", ["nproc", "fleetrun"])
def test_ranks_whose_launcher_is_killed_save_and_end(run_file, tmp_path, start):
    with SignalledRun(start, run_file, tmp_path / "out", [*ENDLESS, *WORKERS]) as run:
        run.wait_for_steps()
        ended = run.signal(KILL)
    # All processes ended within the 10 s that `ended` waits.
    assert ended.left == []
    assert ended.checkpoints == [f"checkpoint-{ended.last_step}"]


# A step far longer than the test, which does not wait for it.
SLOW = ("train.gradient_accumulation_steps=100000", "train.per_device_train_batch_size=1")


@pytest.mark.parametrize(
    ("start", "times", "overrides", "said"),
    [
        ("nproc", 2, (), "ended at once, without a checkpoint"),
        ("one", 1, ("train.stop_grace_s=1.5",), "the time to stop in is over"),
    ],
)
def test_a_step_that_is_not_waited_for(run_file, tmp_path, start, times, overrides, said):
    """After a second Ctrl-C, or when the grace period of the batch system is over."""
    with SignalledRun(start, run_file, tmp_path / "out", [*ENDLESS, *SLOW, *overrides]) as run:
        while not (tmp_path / "out" / "run.json").exists():
            assert run.process.poll() is None
            time.sleep(0.02)
        ended = run.signal(INT, times=times, gap_s=1.0)
    assert ended.code == 1
    assert said in ended.output
    # The step alone would take many minutes.
    assert ended.seconds < 60
    assert ended.left == []
    assert ended.checkpoints == []


def can_make_pid_namespaces() -> bool:
    try:
        return subprocess.run([*PID_1, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


PID_1 = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child"]


@pytest.mark.skipif(not can_make_pid_namespaces(), reason="needs unshare and its privileges")
def test_as_process_1_of_a_container_a_request_saves(run_file, tmp_path):
    with SignalledRun("nproc", run_file, tmp_path / "out", ENDLESS, prefix=PID_1) as run:
        run.wait_for_steps()
        (command,) = psutil.Process(run.process.pid).children()
        command.send_signal(TERM)
        assert run.process.wait(180) == 143
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == [
        f"checkpoint-{run.last_step()}"
    ]
