"""The folder of damaged files."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path) -> Path:
    """An empty folder, with files beside it that no input may open."""
    for name in ("outside.png", "outside.json", "outside.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    (tmp_path / "inputs").mkdir()
    return tmp_path / "inputs"
