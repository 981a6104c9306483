"""A pretraining run on a small mix, killed and continued under another topology.

Guarantees: `fleetrun --nproc_per_node 2 tools/train.py` with two data-parallel ranks, killed, goes
on with two tensor-parallel ranks; rows of the stream, tokens per source, losses (held-out ones per
source too), learning rates that follow tokens, the last step and all parameters and moments are
those of an uninterrupted run in one process.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tests.support.finished_runs import assert_equal_runs, metrics_of
from tests.support.tiny_mix import MAX_TOKENS, SAVE_STEPS, write_mix

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).parents[2]
FLEETRUN = Path(sys.executable).with_name("fleetrun")
TRAIN = str(ROOT / "tools" / "train.py")
DATA_PARALLEL = ("parallel.dp_degree=2", "train.per_device_train_batch_size=2")
TENSOR_PARALLEL = ("parallel.mp_degree=2", "parallel.sequence_parallel=true")


def start(command: list[str], records: Path, output: Path, **variables: str) -> subprocess.Popen:
    records.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name[:7] != "PADDLE_"}
    recorder = ROOT / "tests" / "support" / "recorder"
    environment |= {"PYTHONPATH": f"{recorder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    environment |= {"RECORD": str(records), **variables}
    with output.open("wb") as stream:
        return subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=output.parent
        )


def on_two_ranks(run_file: Path, log: str, *overrides: str) -> list[str]:
    launcher = [str(FLEETRUN), "--nproc_per_node", "2", "--log_dir", str(run_file.parent / log)]
    return [*launcher, TRAIN, str(run_file), *overrides]


def said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.rglob("workerlog.*")))


def kill_all(launcher: subprocess.Popen) -> None:
    processes = [psutil.Process(launcher.pid)]
    processes += processes[0].children(recursive=True)
    for process in processes:
        process.kill()
    launcher.wait()
    psutil.wait_procs(processes)


def rows_of(records: Path) -> dict[int, list[int]]:
    """Tokens by row; ranks that load the same rows, and steps that were repeated, must agree."""
    rows: dict[int, list[int]] = {}
    for file in records.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            assert rows.setdefault(row["row"], row["ids"]) == row["ids"]
    return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Mapping[str, Path]:
    """Folders of the whole run, the killed one, and their recorded rows."""
    folder = tmp_path_factory.mktemp("mix")
    run_file = write_mix(folder)
    paths = {name: folder / name for name in ("whole", "killed", "whole_rows", "first", "second")}
    single = [sys.executable, TRAIN, str(run_file), f"train.output_dir={paths['whole']}"]
    whole = start(single, paths["whole_rows"], folder / "whole.out")
    into = f"train.output_dir={paths['killed']}"
    first = start(
        on_two_ranks(run_file, "log1", into, *DATA_PARALLEL), paths["first"],
        folder / "first.out", DELAY="0.3",
    )  # fmt: skip
    deadline = time.monotonic() + 120
    saved = paths["killed"] / f"checkpoint-{SAVE_STEPS}"
    while not (saved.exists() and metrics_of(paths["killed"])[-1]["step"] > SAVE_STEPS + 1):
        assert first.poll() is None, said(folder)
        assert time.monotonic() < deadline, said(folder)
        time.sleep(0.05)
    kill_all(first)
    assert not (paths["killed"] / "final").exists()
    again = ("train.resume_from_checkpoint=auto", *TENSOR_PARALLEL)
    second = start(
        on_two_ranks(run_file, "log2", into, *again), paths["second"], folder / "second.out"
    )
    assert second.wait(120) == 0, said(folder)
    assert whole.wait(120) == 0, (folder / "whole.out").read_text()
    return paths


def test_every_row_of_the_stream_is_that_of_the_uninterrupted_run(runs):
    wanted, first, second = (rows_of(runs[name]) for name in ("whole_rows", "first", "second"))
    assert sorted(wanted) == list(range(len(wanted)))
    # The second part begins behind a checkpoint, not at the place of the kill.
    begin = min(second)
    assert begin % (4 * SAVE_STEPS) == 0
    assert begin > 0
    assert max(first) >= begin
    assert first.keys() | second.keys() == wanted.keys()
    for part in (first, second):
        assert {row: wanted[row] for row in part} == part


def test_losses_tokens_and_weights_are_those_of_the_uninterrupted_run(runs):
    lines = metrics_of(runs["whole"])
    last = lines[-1]["step"]
    assert lines[-2]["tokens"] < MAX_TOKENS <= lines[-1]["tokens"]
    assert lines[-1]["tokens"] == sum(
        lines[-1][f"tokens/{name}"] for name in ("text", "captions", "pages")
    )
    held_out = [line for line in lines if "eval_loss/pages" in line]
    assert [line["step"] for line in held_out] == [*range(4, last, 4), last]
    assert held_out[-1]["eval_loss/text"] < held_out[0]["eval_loss/text"]
    assert_equal_runs(runs["killed"], runs["whole"], f"checkpoint-{last}")
