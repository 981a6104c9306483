"""Files of a run: its YAML file, settings on the command line, metrics, run records.

Guarantees: see `checking.check`; settings written back are the same.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from paddle_vl.config.family_settings import settings_class_of
from paddle_vl.config.load import load_run_config, raise_problems, read_yaml, save_run_config
from paddle_vl.config.section import setting_descriptions
from paddle_vl.config.validate import launch_problems
from paddle_vl.report.report import write_report
from paddle_vl.train.build import run_family
from tests.single_card_tests.damaged.checking import check
from tests.single_card_tests.damaged.damage import (
    ODD_NUMBERS,
    ODD_TEXTS,
    ODD_VALUES,
    as_json,
    in_file,
    mutated,
    one_damaged,
    texts,
)
from tests.single_card_tests.train.tiny_run import write_tiny_run

CONFIGS = Path(__file__).parents[3] / "configs"
# Errors of rules across settings name these sections.
SECTIONS = ("model.", "data.", "parallel.", "train.", "logging.")
YAML_TOKENS = [
    b"&a ", b"*a", b"<<: *a", b"!!python/object:os.system ", b"!!binary ", b"!!set ", b"!!omap ",
    b"!!timestamp ", b"!!float ", b"!!null ", b"!x ", b"? ", b"- ", b": ", b"|", b">", b"---\n",
    b"%YAML 9.9\n", b"...\n", b"#", b"\t", b"\n", b"  ", b"'", b'"', b"{", b"[", b"]", b"}", b"\0",
    b"\xff", b"\xef\xbb\xbf", b"0x", b"0o9", b"1e400", b".nan", b"2026-99-99", b"[" * 200,
    b"- " * 200, b"9" * 5000, b"a" * 5000, b"~", b"=", b"@",
    b"".join(b"a%d: &a%d [%s]\n" % (i, i, (b"*a%d," % (i - 1)) * 10) for i in range(1, 9)),
]  # fmt: skip
# Values by kind: blank texts, lists, mappings, types that JSON lacks, and values that often fit.
YAML_VALUES = [
    ["''", "' '", "['']", "[{path: ''}]", "[{path: [a, '']}]", "{'': ''}"],
    ["[]", "[[]]", "[null]", "[a, [b]]", "[1]", "[vision, x]", "['[*']"],
    ["{}", "{a: {b: c}}", "{a: [1]}", "{a: 1}", "[{a: 1}]"],
    ["2026-01-01", "2026-01-01 10:00:00", "!!binary aGk=", "!!set {a, b}", "!!omap [a: 1]",
     "!!pairs [a: 1]", ".nan", ".inf", "0x10", "1_000", "1:30", "~", "!!str 1", "!!float 1"],
    ["1", "0.5", "true", "8", "none", "a"],
]  # fmt: skip
LINES: list[dict[str, Any]] = [
    {"step": 10, "loss": 4.0, "grad_norm": 2.0, "learning_rate": 1e-3, "epoch": 0.5,
     "tokens_per_second": 90.0, "skipped_updates": 0, "loader": "train.jsonl"},
    {"step": 20, "loss": None, "grad_norm": 3, "skipped_updates": 1, "FAST": 0.5},
    {"step": 30, "loss": 2.0, "eval_loss": 3.0, "quite_new": {"a_min": 1, "a_max": 3}},
]  # fmt: skip
SETTINGS: dict[str, Any] = {
    "model": {"pretrained": "models/a", "freeze": ["vision"]},
    "train": {"output_dir": "runs/one", "max_steps": 30, "learning_rate": 0.002, "seed": 0},
}
START: dict[str, Any] = {
    "started": "2026-11-21T10:00:00+00:00", "ended": "2026-11-21T11:05:00+00:00",
    "first_step": 0, "last_step": 30, "command": ["paddle-vl", "train", "a.yaml"],
    "overrides": ["train.seed=1"], "folder": "/home/me", "platform": "Linux", "host": "node",
    "git": {"revision": "0123456789abcdef", "is_dirty": True}, "paddle_vl_git": None,
    "versions": {"python": "3.11.2", "numpy": "2.0.0"}, "device": "cpu", "device_name": "EPYC",
    "num_processes": 4, "parallel": {"dp_degree": 2, "mp_degree": 2}, "settings": SETTINGS,
}  # fmt: skip


def as_yaml(document: Any) -> bytes:
    try:
        return yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass")
    except (ValueError, yaml.YAMLError, RecursionError):
        # JSON is YAML too, for documents that safe_dump cannot write.
        return as_json(document)


def written_back(run: Path, overrides: Sequence[str] = ()) -> Any:
    """The settings of a run, which must be the same when they are written and read again."""
    config, again = load_run_config(run, overrides), run.with_name("again.yaml")
    save_run_config(config, again)
    assert load_run_config(again).model_dump() == config.model_dump()
    return config


def test_yaml_file(folder):
    files = sorted([*CONFIGS.glob("pi07/*.yaml"), *CONFIGS.glob("qwen3_vl/*.yaml")])
    whole = [file.read_bytes() for file in files if b"\ntrain:" in file.read_bytes()]
    run = folder / "run.yaml"
    run.write_bytes(whole[0])
    changed = mutated([yaml.safe_load(text) for text in whole]).map(as_yaml)
    inputs = st.one_of(changed, changed, texts(whole, YAML_TOKENS), texts([b""], YAML_TOKENS))
    named = ("run.yaml", "again.yaml", *SECTIONS)
    check(folder, lambda: written_back(run), in_file("run.yaml", inputs), *named)


def test_any_value_for_any_setting(folder):
    """What the settings' types and rules accept goes on to the rules about files and, for Qwen3-VL,
    to processor and data, which must not fail on a value that should have been refused before."""
    given = folder / "given.json"
    runs = {"qwen": write_tiny_run(folder), "pi07": folder / "pi07.yaml"}
    runs["pi07"].write_bytes((CONFIGS / "pi07" / "tiny_cpu.yaml").read_bytes())
    given.write_bytes(as_json(["qwen", ["train.seed=3"]]))
    names = {
        key: [*setting_descriptions(settings_class_of(read_yaml(run)[0]))]
        for key, run in runs.items()
    }
    odd_names = ["model", "data.train.path", "x.y", "train.", "train.seeed", "train..seed",
                 ".".join("a" * 100), "data.train[0]", *ODD_TEXTS]  # fmt: skip

    def parse() -> None:
        key, changes = json.loads(given.read_text())
        config = written_back(runs[key], changes)
        if key == "qwen":
            raise_problems(launch_problems(config, "cpu"))
            run_family(config)

    # Paths to files outside of the folder are right in a run.
    near = lambda text: not ("/" in text or "\\" in text or text.strip("'\" []") in (".", ".."))  # noqa: E731
    odd = [
        [as_json(each).decode() for each in kind] for kind in (ODD_VALUES, ODD_NUMBERS, ODD_TEXTS)
    ]
    kinds = [*([*filter(near, kind)] for kind in odd), *YAML_VALUES]

    def chosen(number: int) -> bytes:
        # hypothesis repeats itself in choices among hundreds of names and values.
        draw = random.Random(number)
        key = draw.choice([*runs])
        name = draw.choice(odd_names if number % 8 == 0 else names[key])
        return as_json([key, [f"{name}={draw.choice(draw.choice(kinds))}"]])

    inputs = in_file(given.name, st.integers(0, 1 << 48).map(chosen))
    # A path that no file system has is named as it is.
    named = ("command line", "File name too long", *(run.name for run in runs.values()), *SECTIONS)
    check(folder, parse, inputs, *named)


def test_files_that_a_report_reads(folder):
    starts = [START, START | {"first_step": 20, "ended": None, "settings": {}}]
    (folder / "metrics.jsonl").write_bytes(b"\n".join(map(as_json, LINES)) + b"\n")
    (folder / "config.yaml").write_bytes(as_yaml(SETTINGS))
    (folder / "run.json").write_bytes(as_json({"starts": starts}))
    config = in_file("config.yaml", mutated([SETTINGS]).map(as_yaml))
    inputs = st.one_of(
        one_damaged(folder, "*.jsonl"), one_damaged(folder, "*.json", {"starts": []}), config
    )
    parse = lambda: write_report([folder], folder / "report", with_pictures=False)  # noqa: E731
    check(folder, parse, inputs, "metrics.jsonl", "run.json", "config.yaml")
