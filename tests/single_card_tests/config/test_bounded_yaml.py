"""YAML beyond the limits, which are lowered where they are large, and settings out of range."""

from pathlib import Path

import pytest

from paddle_vl.config import bounded_yaml
from paddle_vl.config.load import load_run_config
from paddle_vl.config.section import setting_descriptions
from paddle_vl.config.validate import launch_problems
from paddle_vl.families.pi07.settings import PI07Run
from tests.single_card_tests.config.test_load import MINIMAL


def lists() -> str:
    """Ten lines for 1,110 values."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for level in range(1, 3):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    return "\n".join(lines)


def merges() -> str:
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, 4):
        lines.append(f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}")
    return "\n".join(lines)


HOSTILE = [
    (b"a: &a [*a]", "an alias is inside its own anchor"),
    (b"a: " + b"[" * 70, "nested more than 64 deep"),
    (b"a: " + b"{a: " * 70, "nested more than 64 deep"),
    (b"\n".join(b" " * i + b"a:" for i in range(70)), "nested more than 64 deep"),
    (b"x" * 3_000_000, "it has 3,000,000 characters"),
    (b"a: [" + b"1," * 60_000 + b"1]", "more than 50,000 values"),
    (b"a: " + b"9" * 5000, "digits"),
    (b"train: {seed: 0x" + b"f" * 50 + b"}", "train.seed is a number of 200 bits"),
    (b"a: \0", "not allowed"),
    (b'train: {output_dir: "a\\0b"}', "train.output_dir is 'a.x00b'"),
    (b'train: {output_dir: "\\ud800"}', "train.output_dir is"),
    (b"\xff\xfe", "is not UTF-8 text"),
    (b"a: 2024-13-45", "month must be in 1..12"),
    (b"a: !!bool x", "not what it looks like"),
    (b"a: !!timestamp x", "not what it looks like"),
    (b"a: !!int ''", "not what it looks like"),
    (b"a: !!python/object:os.system x", "could not determine a constructor"),
    (b"1: 2", "1 is not a setting"),
    (b"{1: 2, '1': 3}", "1 is set a second time"),
    (b"a: {0x1: 2}", "a has the key 1, .*put it in quotes"),
    (b"true: 2", "has the key True"),
    (b"~: 2", "has the key None"),
    (b"? [a]\n: b", "unhashable"),
    (b"a: 1\n---\nb: 2", "another document"),
    (b"a: *x", "undefined alias"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "named"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files_are_refused_by_name(tmp_path, text, named):
    file = tmp_path / "run.yaml"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=rf"(?s)run\.yaml.*{named}"):
        load_run_config(file)


@pytest.mark.parametrize("text", [lists(), merges()], ids=["lists", "merges"])
def test_files_that_expand_are_refused_before_values_are_made(file, text, monkeypatch):
    monkeypatch.setattr(bounded_yaml, "_MAX_VALUES", 500)
    monkeypatch.setattr(bounded_yaml._Loader, "construct_document", None)
    file.write_text(text)
    with pytest.raises(ValueError, match="expanded this has more than 500 values"):
        load_run_config(file)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r"\w") as error:
        load_run_config(file, overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.config=[" + "1," * 60_000 + "1]", "more than 50,000 values"),
        ("model.config=" + "[" * 70, "nested more than 64 deep"),
        ("train.seed=" + "9" * 5000, "digits"),
        ("train.seed=0x" + "f" * 5000, "number of 20000 bits"),
        ('train.output_dir="a\\0b"', "no text or path may have"),
        ("a." * 5000 + "b=1", "has 5001 names"),
        ("foo.bar=1", "foo is not a setting; the sections are"),
        ("foo.bar.baz=1", "foo is not a setting"),
        ("train.seed.x.y=1", 'train.seed is {"x": {"y": 1}}'),
        ("train.part_learning_rates.x=a", 'train.part_learning_rates is "a"'),
        ("data.num_workers=1000000", "data.num_workers is 1000000; it must be at most"),
        ("parallel.dp_degree=1000000000000", "parallel.dp_degree is"),
        ("model.lora={target_modules: [a], r: 1000000000}", "model.lora.r is 1000000000"),
    ],
)
def test_hostile_overrides_name_the_command_line(file, override, named):
    message = refusal(file, override)
    assert message.startswith("command line: ")
    assert named in message
    assert "run.yaml" not in message
    assert len(message) < 1000


def test_padding_beyond_the_longest_row_is_refused(file):
    assert "exceeds the longest row of 2048" in refusal(file, "data.pad_to_multiple_of=4096")
    assert load_run_config(file, ["data.pad_to_multiple_of=2048"]).data.pad_to_multiple_of == 2048


@pytest.mark.parametrize("inside", ["", "runs"])
def test_output_dir_that_is_a_file_or_inside_one_is_refused(file, inside):
    config = load_run_config(file, [f"train.output_dir={file / inside}"])
    problems = launch_problems(config, "cpu")
    assert any(f"{file} is a file, not a folder" in problem for problem in problems)


def test_defaults_are_shown():
    shown = {name: default for name, (default, _) in setting_descriptions(PI07Run).items()}
    assert "Undefined" not in "".join(shown.values())
    assert shown["data.drops"] == "its settings below"
    assert shown["data.drops.subgoal_drop_prob"] == "0.75"
