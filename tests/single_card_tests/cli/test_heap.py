"""malloc of a training run.

Guarantees: `train` and `profile` start once more with whole blocks, other commands do not, and a
value that the user has chosen stays; the process keeps its number and arguments.
"""

import os
import platform
import subprocess
import sys

import pytest

from paddle_vl.cli.main import MALLOC_VARIABLE as VARIABLE

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
SETTING = "glibc.malloc.tcache_count"
# Python runs it at each start.
STARTS = f"""
import os, sys
print("start", os.getpid(), os.environ.get({VARIABLE!r}), file=sys.stderr)
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    unset = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env={**unset, **environment}
    )


@pytest.mark.parametrize(
    ("command", "given", "found"),
    [
        ("train", None, [None, f"{SETTING}=0"]),
        ("profile", "glibc.malloc.hugetlb=0", ["glibc.malloc.hugetlb=0", ""]),
        ("train", f"{SETTING}=7", [f"{SETTING}=7"]),
        ("report", None, [None]),
    ],
)
def test_training_starts_again_with_whole_blocks(tmp_path, command, given, found):
    (tmp_path / "sitecustomize.py").write_text(STARTS)
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    environment = {} if given is None else {VARIABLE: given}
    done = run("-u", "-m", "paddle_vl", command, "none", PYTHONPATH=path, **environment)
    assert done.returncode == 1
    starts = [line.split() for line in done.stderr.splitlines() if line.startswith("start ")]
    expected = [f"{given}:{SETTING}=0" if value == "" else str(value) for value in found]
    assert [value for _, _, value in starts] == expected
    # A launcher waits for the number it started.
    assert len({number for _, number, _ in starts}) == 1
    # The arguments are those of the command.
    assert "error: " in done.stderr
    assert "none" in done.stderr
