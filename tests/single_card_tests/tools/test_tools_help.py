"""The tools and their interpreter.

Guarantees: every tool prints its help without its dependencies; the scripts look for the Python
versions that the package allows.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked

ROOT = Path(__file__).parents[3]
TOOLS = [
    path.relative_to(ROOT / "tools").as_posix()
    for path in sorted([*(ROOT / "tools").glob("*.py"), *(ROOT / "tools/benchmarks").glob("*.py")])
    if '__name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_explains_itself(tool):
    result = forked.run([str(ROOT / "tools" / tool), "--help"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: ")


def script(tmp_path: Path, body: str, version: str) -> subprocess.CompletedProcess:
    """Run functions of tools/environment.sh with Pythons that all report `version`."""
    numbers = tuple(map(int, version.split(".")))
    for name in ("python3", "python3.13", "python3.12", "python3.11", "python3.10", "python"):
        fake = tmp_path / name
        code = f"import sys; sys.version_info = {numbers}; exec(sys.argv[1])"
        fake.write_text(
            f'#!/bin/sh\nif [ "$1" = --version ]; then echo Python {version}; exit 0; fi\n'
            f"exec {sys.executable} -c '{code}' \"$2\"\n"
        )
        fake.chmod(0o755)
    return subprocess.run(
        ["bash", "-c", f"source {ROOT}/tools/environment.sh; {body}"],
        capture_output=True, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("version", "fits"), [("3.9.9", False), ("3.10.0", True), ("3.13.1", True), ("3.14.0", False)]
)
def test_scripts_take_the_interpreters_that_paddle_has_wheels_for(tmp_path, version, fits):
    result = script(tmp_path, "_find_python", version)
    assert (result.returncode == 0) == fits
    if not fits:
        assert f"no Python 3.10 to 3.13 found, for which Paddle has wheels (python3 is Python " \
            f"{version})" in result.stderr  # fmt: skip
        named = script(tmp_path, f"PYTHON={tmp_path}/python3 _find_python", version)
        assert "name one of these" in named.stderr


def test_bounds_are_the_same_everywhere():
    metadata = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10,<3.14"' in metadata
    assert re.findall(r"Python :: (3\.\d+)", metadata) == ["3.10", "3.11", "3.12", "3.13"]
    assert 'PYTHON_VERSIONS="3.10 to 3.13"' in (ROOT / "tools" / "environment.sh").read_text()
