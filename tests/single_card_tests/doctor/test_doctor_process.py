"""The process that runs the doctor's checks, and what happens when it dies.

Guarantees: a segmentation fault, an exit, a hang and an exception of a check are each a finding
with a remedy, and the checks after it run, on a GPU in a new process after an exception too; a
hanging check's own processes end with it; a Paddle that cannot be imported is a finding; an unknown
name is refused; the exit code is 1 if anything is wrong; the JSON is complete after every check and
has a fixed form.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from paddle_vl.doctor.check import UnknownCheckError
from paddle_vl.doctor.examination import FORMAT, examine, supervised
from tests.support import doctor_faults

KEYS = {"format", "paddle_vl", "started", "seconds", "only", "is_quick", "ok", "counts", "checks"}
CHECK_KEYS = {"name", "title", "status", "found", "figures", "remedy", "seconds"}


def command(*faults: str) -> list[str]:
    return [sys.executable, doctor_faults.__file__, ",".join(faults)]


RUNS = {"with": ("error", "segfault", "fine"), "without": ("leave", "hang", "end", "error", "fine")}


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """All faults, some in processes with Paddle and some without; and the folder."""
    folder = tmp_path_factory.mktemp("doctor")
    return {
        finished["name"]: finished
        for name, faults in RUNS.items()
        for finished in supervised(command(*faults), folder / name)
    }, folder


@pytest.mark.parametrize(
    ("name", "words", "function"),
    [
        ("error.0", "raised RuntimeError: no kernel for this device", None),
        ("segfault.1", "SIGSEGV", "segfault"),
        ("leave.0", "exit code 3", None),
        ("end.2", "exit code 0", None),
        ("hang.1", "did not end within 1 s", "hang"),
    ],
)
def test_a_fault_of_a_check_is_a_finding_that_shows_where_it_was(findings, name, words, function):
    result = findings[0][name]
    assert result["status"] == "wrong"
    assert words in result["found"]
    assert result["remedy"]
    assert function is None or f"in {function}" in "\n".join(result["figures"]["output"])


def test_the_checks_after_a_fault_run_and_what_a_hanging_one_has_started_ends(findings):
    assert list(findings[0]) == [
        *("error.0", "segfault.1", "fine.2"),
        *("leave.0", "hang.1", "end.2", "error.3", "fine.4"),
    ]
    assert [findings[0][name]["status"] for name in ("fine.2", "fine.4")] == ["ok", "ok"]
    (file,) = findings[1].rglob(doctor_faults.CHILD_FILE)
    child = int(file.read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("device", "processes"), [("cpu", 1), ("gpu", 2)])
def test_after_an_error_on_a_gpu_the_other_checks_get_a_new_process(
    tmp_path, monkeypatch, device, processes
):
    monkeypatch.setenv(doctor_faults.DEVICE, device)
    found = list(supervised(command("fine", "error", "fine", "fine"), tmp_path))
    assert [finished["status"] for finished in found] == ["ok", "wrong", "ok", "ok"]
    ids = [finished["figures"]["process"] for finished in found if finished["name"][0] == "f"]
    assert len(set(ids)) == processes
    assert ids[1] == ids[2]


def test_a_paddle_that_cannot_be_imported_is_a_finding(tmp_path):
    (finished,) = supervised(command("import"), tmp_path)
    assert finished["status"] == "wrong"
    assert "imported Paddle" in finished["found"]
    assert any("libcudnn" in line for line in finished["figures"]["output"])


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(UnknownCheckError, match=r"--only fime.0.*did you mean fine.0"):
        list(supervised(command("fine"), tmp_path, ["fime.0"]))


@pytest.mark.parametrize(("faults", "code"), [(("fine",), 0), (("fine", "error", "fine"), 1)])
def test_exit_code_table_and_json_which_is_complete_after_every_check(
    tmp_path, capsys, monkeypatch, faults, code
):
    file, seen = tmp_path / "doctor.json", []
    written = os.replace

    def count(*args, **kwargs):
        written(*args, **kwargs)
        if str(args[1]) == str(file):
            seen.append(len(json.loads(file.read_text())["checks"]))

    monkeypatch.setattr(os, "replace", count)
    assert examine(command(*faults), json_file=file) == code
    assert seen == [*range(len(faults) + 1)]
    content = json.loads(file.read_text())
    assert content.keys() == KEYS
    assert (content["format"], content["ok"]) == (FORMAT, code == 0)
    assert [check.keys() for check in content["checks"]] == [CHECK_KEYS] * len(faults)
    assert content["checks"][0]["figures"]["value"] == "nan"
    assert sum(content["counts"].values()) == len(faults)
    shown = capsys.readouterr().out
    assert shown.startswith("| check")
    assert ("WRONG  error.1" in shown, "nothing is wrong" in shown) == (code == 1, code == 0)


def test_a_json_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        examine(["/bin/false"], json_file=tmp_path / "nowhere" / "doctor.json")
