"""The comparison of chat templates with recorded values: what it finds, and its exit status."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import check_templates

GOLDEN = Path(__file__).parents[2] / "golden" / "templates"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A template with one conversation."""
    for name in ("jinja", "tokenizer"):
        shutil.copytree(GOLDEN / name, tmp_path / name)
    shutil.copy(GOLDEN / "conversations.json", tmp_path)
    lines = (GOLDEN / "ernie_style.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "ernie_style.jsonl").write_text(lines[0] + "\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("text", "x"),
        ("ids", [1]),
        ("generation_prompt", "x"),
        ("dropped", ["x"]),
        ("diff", {"ok": False, "why": "x"}),
        ("diff", {"ok": True, "spans": [[0, 1]]}),
        ("mark_spans", [[0, 1]]),
        ("mask", "1"),
        ("error", "TypeError: x"),
    ],
)
def test_each_value_that_differs_is_named(folder, monkeypatch, capsys, key, value):
    monkeypatch.setattr(sys, "argv", ["check_templates.py", str(folder)])
    assert check_templates.main() == 0
    assert capsys.readouterr().out == "ernie_style plain: equal\n1 equal, 0 different\n"
    file = folder / "ernie_style.jsonl"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {key: value}))
    assert check_templates.main() == 1
    assert f"plain: differs in {key}" in capsys.readouterr().out
    file.unlink()
    assert check_templates.main() == 1
