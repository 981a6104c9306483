"""What a run does before its first step, counted.

Guarantees: of a file of data only its first bytes are read at a start after the first, and no
image; at the first start the lines and each image's header are read once; kernels that were
compiled are not compiled again; parts of the package that a run does not need and large packages
beside Paddle are not imported; a refused setting does not load Paddle.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.single_card_tests.train.tiny_run import write_tiny_run

# Counts until the settings are written, which is before the first step.
PROGRAM = """
import json, os, sys
from collections import Counter

folder, opened, started = sys.argv[1], Counter(), []

def tell():
    print(json.dumps([opened, started, [*sys.modules]]), flush=True)

def watch(event, args):
    if event == "open":
        path = str(args[0])
        if path.startswith(folder):
            opened[os.path.relpath(path, folder)] += 1
        if path.startswith(os.path.join(folder, "out", "config.yaml")):
            tell()
            os._exit(0)
    elif event == "subprocess.Popen":
        started.append(os.path.basename(str(args[0])))

sys.addaudithook(watch)
from paddle_vl.cli.main import main
code = main(sys.argv[2:])
tell()
sys.exit(code)
"""
UNUSED = (
    "doctor", "export", "generation.loop", "integrations", "profile", "report", "serving",
    "simulation", "testing",
)  # fmt: skip
# What Paddle imports itself is not in our hands.
MOST_MODULES = 2200
FOREIGN = ("av", "matplotlib.pyplot", "onnx", "pandas", "pyarrow", "scipy", "sklearn", "torch")


def start(run: Path, seed: int, *settings: str) -> subprocess.CompletedProcess:
    """Start a run; the order of a set differs between processes with different seeds."""
    arguments = [str(run.parent), "train", str(run), "data.packing=true", *settings]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def counts(done: subprocess.CompletedProcess) -> tuple[dict[str, int], list[str], list[str]]:
    """Files of the run by how often they were opened, programs that were started, modules."""
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    run = write_tiny_run(tmp_path_factory.mktemp("startup"), 6)
    data = run.with_name("train.jsonl")
    data.write_text(data.read_text() * 200)
    return run


def test_what_a_start_reads_and_imports_is_counted(run):
    first, second = (counts(start(run, seed)) for seed in (1, 2))
    for found in (first, second):
        opened, _, modules = found
        assert opened["processor/tokenizer.json"] == 1
        assert max(count for name, count in opened.items() if name.startswith("processor")) <= 2
        packages = {name.removeprefix("paddle_vl.") for name in modules}
        assert not [name for name in (*UNUSED, *FOREIGN) if name in packages]
        assert len(modules) < MOST_MODULES
    # Of Paddle's own import; the first start may compile.
    assert set(second[1]) <= {"sh", "which"}
    # Its first bytes, which say of what kind it is, and all of it.
    assert first[0]["train.jsonl"] == 2
    assert [first[0][f"images/{number}.png"] for number in range(6)] == [1] * 6
    assert second[0]["train.jsonl"] == 1
    # It reads no image, and writes nothing beside the data.
    names = sorted(name for name in second[0] if not name.startswith(("out", "proc", "run.yaml")))
    assert names[0] == ".paddle_vl/train.jsonl.checked"
    assert names[1].startswith(".train.jsonl.lengths-")
    assert names[1].endswith(".npz")
    assert names[2:] == ["train.jsonl"]


def test_a_refused_setting_does_not_load_paddle(run):
    done = start(run, 1, "train.max_step=3")
    assert done.returncode == 1
    _, started, modules = counts(done)
    assert not started
    assert not {"paddle", "numpy", "PIL"} & {*modules}
