"""Data settings in complete runs, of conversations and of demonstrations."""

import json
import shutil
from pathlib import Path

import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import write_tiny_run

HOSTILE = ['{"messages": ' + "[" * 100_000, '{"messages": "\\ud800"}', '{"a": "' + "a" * 3_000_000]


@pytest.fixture(params=[write_tiny_run, write_tiny_policy_run])
def run_file(request, tmp_path) -> Path:
    return request.param(tmp_path)


@pytest.fixture
def data_file(run_file) -> Path:
    return Path(load_run_config(run_file, []).data.train[0])


def build(run_file, *settings):
    return build_trainer(load_run_config(run_file, list(settings)))


def write(file, *lines) -> None:
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_settings_of_data_files_reach_them(run_file, data_file):
    text = data_file.read_text()
    record = json.loads(text.splitlines()[0])
    image = (record.get("images") or record["camera0"])[0]
    outside = data_file.parent.parent / f"{data_file.parent.name}-outside.png"
    outside.write_bytes((data_file.parent / image).read_bytes())
    write(data_file, text.replace(image, f"../{outside.name}", 1).rstrip("\n"))
    build(run_file)
    with pytest.raises(BadSampleError, match=r"jsonl:1: .*data\.allow_outside is false"):
        build(run_file, "data.allow_outside=false")
    padding = " " * 2000
    write(data_file, *(line + padding for line in text.splitlines()))
    build(run_file)
    with pytest.raises(BadSampleError, match=r"jsonl:1: .*more than 1500 bytes"):
        build(run_file, "data.max_line_bytes=1500")


def test_a_run_that_skips_trains_through_hostile_lines(run_file, data_file, tmp_path):
    write(data_file, *HOSTILE, *data_file.read_text().splitlines())
    with pytest.raises(BadSampleError, match="jsonl:[123]: "):
        build(run_file, "train.max_steps=1").run()
    assert build(run_file, "data.on_bad_sample=skip", "train.max_steps=1").run() is None
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["skipped_samples"] == 3


def test_a_run_does_not_go_on_in_edited_data(run_file, data_file, tmp_path):
    assert build(run_file, "train.max_steps=1", "train.save_steps=1").run() is None
    going_on = ["train.max_steps=2", "train.resume_from_checkpoint=auto"]
    text = data_file.read_text()
    word = "mark" if "mark" in text else "red"
    edited = text.replace(word, word[::-1], 1)
    assert edited != text
    data_file.write_text(edited)
    with pytest.raises(ValueError, match=rf"lines of {data_file} were added, removed or edited"):
        build(run_file, *going_on).run()
    data_file.write_text(text)
    assert build(run_file, *going_on).run() is None
    # Moved files are the same data; an edited one is not, wherever it lies.
    moved = data_file.parent / "moved" / "other_name.jsonl"
    shutil.copytree(data_file.parent, moved.parent, ignore=shutil.ignore_patterns("out"))
    moved.parent.joinpath(data_file.name).rename(moved)
    data_file.rename(data_file.with_suffix(".gone"))
    going_on = ["train.max_steps=3", "train.resume_from_checkpoint=auto", f"data.train=[{moved}]"]
    moved.write_text(edited)
    with pytest.raises(ValueError, match=rf"lines of {moved} were added, removed or edited"):
        build(run_file, *going_on).run()
    moved.write_text(text)
    assert build(run_file, *going_on).run() is None
    with pytest.raises(ValueError, match=r"cannot be continued with another data\.train"):
        build(run_file, *going_on[:2], f"data.train=[{moved}, {moved}]")
