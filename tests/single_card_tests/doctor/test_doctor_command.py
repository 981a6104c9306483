"""`paddle-vl doctor` as a command.

Guarantees: it examines this installation in a process of its own, prints a table, writes its JSON
and exits with 0; names are listed, and docs/doctor.md explains
each; a missing folder and a launcher are refused before a check runs;
on a CPU the whole examination finds nothing wrong and skips only what needs a GPU (heavy); ranks
that fail or compute other numbers are findings (heavy).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_vl.cli.main import main
from paddle_vl.doctor import ranks
from paddle_vl.doctor.check import Machine, all_checks

ROOT = Path(__file__).parents[3]
NEEDS_GPU = {
    "environment.bfloat16",
    "golden.qwen3_vl_bfloat16",
    "golden.qwen3_5_bfloat16",
    "golden.qwen4_exp_bfloat16",
    "golden.paddleocr_vl_bfloat16",
}


def doctor(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "paddle_vl", "doctor", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


def test_chosen_checks_of_this_installation_pass(tmp_path):
    file = tmp_path / "doctor.json"
    done = doctor("--quick", "--json", str(file), "--only", "environment", "kernels.rms_norm")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(file.read_text())["checks"]}
    assert list(checks) == [
        *(f"environment.{name}" for name in ("versions", "flags", "memory", "tf32", "bfloat16")),
        "kernels.rms_norm",
    ]
    assert checks["kernels.rms_norm"]["status"] == "ok"
    assert "needs a GPU with bfloat16" in checks["environment.bfloat16"]["found"]
    assert "| kernels.rms_norm" in done.stdout
    # A line for each check as it ends, apart from the table.
    assert "environment.tf32: info" in done.stderr


def test_the_list_has_and_the_page_explains_every_check(capsys):
    assert main(["doctor", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{check.name} " in shown for check in all_checks())
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    names = {"kernels.*" if check.group == "kernels" else check.name for check in all_checks()}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_a_missing_folder_and_a_launcher_are_refused(tmp_path, monkeypatch, capsys):
    assert main(["doctor", "--json", str(tmp_path / "nowhere" / "d.json")]) == 1
    assert "its folder does not exist" in capsys.readouterr().err
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    assert main(["doctor"]) == 1
    assert "leave fleetrun out" in capsys.readouterr().err


@pytest.mark.heavy
def test_the_whole_examination_passes_on_a_cpu(tmp_path):
    file = tmp_path / "doctor.json"
    done = doctor("--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    by_status = {check["name"]: check["status"] for check in content["checks"]}
    assert {name for name, status in by_status.items() if status == "skipped"} == NEEDS_GPU
    assert {"ranks.topologies", "ranks.bandwidth"} < by_status.keys()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parallel.dp_degree": 2, "train.weight_decay": 0.3}, "planted differ from one device"),
        ({"parallel.dp_degree": 3}, "2 ranks failed with exit code 1 in planted"),
    ],
)
def test_a_planted_fault_of_a_topology_is_found(tmp_path, monkeypatch, settings, words):
    monkeypatch.setattr(ranks, "topologies", lambda number: {"planted": settings})
    machine = Machine("cpu", 0, False, False, tmp_path)
    result = ranks.every_topology(machine)
    assert result.status == "wrong"
    assert words in result.found
