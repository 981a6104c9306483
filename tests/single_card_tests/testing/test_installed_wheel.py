"""`paddle_vl.testing` of a wheel of this checkout, installed into an empty environment.

There, outside of the checkout, every example of docs/testing.md runs as a user's tests, and a
user's test fails when a gather list is wrong; the wheel has the C file of the CPU kernels.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NEEDED = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
OWN = """
import paddle_vl.testing
from paddle_vl.nn.cpu import compiler

def test_the_package_comes_from_the_wheel():
    assert "site-packages" in paddle_vl.testing.__file__
    for file in compiler.SOURCES:
        assert "site-packages" in str(file)
        assert "_backward(" in file.read_text(encoding="utf-8")

def test_wrong():
    assert_equals_single_device(tiny_qwen3_vl, lambda model: my_step(model, 1), mp_degree=2)
"""


def done(*command: object, cwd: Path) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=environment
    )


def run(*command: object, cwd: Path) -> None:
    ended = done(*command, cwd=cwd)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The interpreter of an environment that has the wheel, and this one's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    # Not in the checkout, where a build would leave files.
    shutil.copytree(
        ROOT / "paddle_vl", sources / "paddle_vl", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in NEEDED:
        shutil.copy(ROOT / name, sources)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index")
    run(*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, sources, cwd=folder)
    shutil.rmtree(sources)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "environment", cwd=folder)
    python = folder / "environment" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    run(*pip, "--python", python, "install", "--no-compile", *offline, wheel, cwd=folder)
    # Packages of a folder in a .pth file are found last, and its own .pth files, such as that of an
    # editable installation of the checkout, are not read.
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "environment")}))
    (site / "others.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return python


def examples() -> str:
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 4
    return "\n\n".join(blocks)


def test_the_examples_of_the_page_run_as_a_users_tests(installed, tmp_path):
    (tmp_path / "test_mine.py").write_text(examples() + OWN, encoding="utf-8")
    command = (installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py")
    shown = done(*command, cwd=tmp_path).stdout
    assert "mp_degree 2 with sequence parallelism: " in shown
    assert re.findall(r"^FAILED (\S+)", shown, re.MULTILINE) == ["test_mine.py::test_wrong"]
    assert re.search(r"^1 failed, 10 passed", shown, re.MULTILINE), shown
