"""Files of a run: its YAML file, settings on the command line, metrics, run records."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from faults.tiny_run import write_tiny_run
from fuzzing.mutations import (
    ODD_NUMBERS,
    ODD_TEXTS,
    ODD_VALUES,
    as_json,
    damaged_text,
    in_file,
    json_bytes,
    json_lines,
    mutated,
    odd_values,
)
from fuzzing.parser import Parser
from paddle_vl.config.family_settings import settings_class_of
from paddle_vl.config.load import load_run_config, raise_problems, read_yaml, save_run_config
from paddle_vl.config.section import setting_descriptions
from paddle_vl.config.validate import launch_problems
from paddle_vl.report.report import write_report
from paddle_vl.train.build import run_family

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# Errors of rules across settings name these sections.
_SECTIONS = ("model.", "data.", "parallel.", "train.", "logging.")
_YAML_TOKENS = [
    b"&a ", b"*a", b"<<: *a", b"!!python/object:os.system ", b"!!binary ", b"!!set ", b"!!omap ",
    b"!!timestamp ", b"!!float ", b"!!int ", b"!!null ", b"!!bool ", b"!x ", b"? ", b"- ", b": ",
    b"|", b">", b"%YAML 9.9\n", b"---\n", b"...\n", b"#", b"\t", b"\n", b"  ", b"'", b'"', b"{",
    b"[", b"]", b"}", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xf0\x9f\x98\x80", b"0x", b"0o9", b"1e400",
    b".nan",
    b"2026-99-99", b"1:99:99", b"[" * 200, b"- " * 200, b"9" * 5000, b"a" * 5000, b"~", b"=", b"@",
    b"a: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n",
    b"".join(b"a%d: &a%d [%s]\n" % (i, i, (b"*a%d," % (i - 1)) * 10) for i in range(1, 9)),
]  # fmt: skip
# Values by kind: blank texts, lists, mappings, types that JSON lacks, and values that often fit.
_YAML_VALUES = [
    ["''", "' '", "['']", "[' ']", "[{path: ''}]", "[{path: [a, '']}]", "{'': ''}"],
    ["[]", "[[]]", "[null]", "[a, [b]]", "[1]", "[vision, x]", "['[*']"],
    ["{}", "{a: {b: c}}", "{a: [1]}", "{a: 1}", "[{a: 1}]"],
    ["2026-01-01", "2026-01-01 10:00:00", "!!binary aGk=", "!!set {a, b}", "!!omap [a: 1]",
     "!!pairs [a: 1]", ".nan", ".inf", "0x10", "1_000", "1:30", "~", "!!str 1", "!!float 1",
     "|\n a\n b"],
    ["1", "0.5", "true", "8", "none", "a"],
]  # fmt: skip
_LINES: list[dict[str, Any]] = [
    {"step": 10, "loss": 4.0, "grad_norm": 2.0, "learning_rate": 1e-3, "epoch": 0.5,
     "learning_rate/mergers": 1e-2, "tokens_per_second": 90.0, "skipped_updates": 0,
     "target_tokens": 100, "loader": "train.jsonl"},
    {"step": 20, "loss": None, "grad_norm": 3, "skipped_updates": 1, "FAST": 0.5},
    {"step": 25, "eval_loss": 2.5},
    {"step": 30, "loss": 2.0, "eval_loss": 3.0, "quite_new": {"a_min": 1, "a_max": 3}},
]  # fmt: skip
_SETTINGS: dict[str, Any] = {
    "model": {"pretrained": "models/a", "freeze": ["vision"]},
    "train": {"output_dir": "runs/one", "max_steps": 30, "learning_rate": 0.002, "seed": 0},
}
_START: dict[str, Any] = {
    "started": "2026-11-21T10:00:00+00:00", "ended": "2026-11-21T11:05:00+00:00",
    "first_step": 0, "last_step": 30, "command": ["paddle-vl", "train", "a.yaml"],
    "overrides": ["train.seed=1"], "folder": "/home/me", "platform": "Linux", "host": "node",
    "git": {"revision": "0123456789abcdef", "is_dirty": True}, "paddle_vl_git": None,
    "versions": {"python": "3.11.2", "numpy": "2.0.0"}, "device": "cpu", "device_name": "EPYC",
    "num_processes": 4, "parallel": {"dp_degree": 2, "mp_degree": 2, "vision": "spread"},
    "settings": _SETTINGS,
}  # fmt: skip
_RESUMED = _START | {"first_step": 20, "ended": None, "settings": {"train": {"seed": 1}}}


def _as_yaml(document: Any) -> bytes:
    try:
        return yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass")
    except (ValueError, yaml.YAMLError, RecursionError):
        # JSON is YAML too, for documents that safe_dump cannot write.
        return as_json(document) if "9" * 20 not in repr(type(document)) else b""


def yaml_file(folder: Path) -> Parser:
    """A run's YAML file; the settings written back must be the same."""
    texts = [path.read_bytes() for path in sorted(_CONFIGS.glob("*/*.yaml")) if _is_run(path)]
    run = folder / "run.yaml"
    run.write_bytes(texts[0])
    documents = mutated([yaml.safe_load(text) for text in texts])
    structured = documents.map(_as_yaml)
    broken = damaged_text(texts, _YAML_TOKENS)
    raw = st.lists(st.sampled_from(_YAML_TOKENS), max_size=6).map(b"".join)

    inputs = st.one_of(structured, structured, broken, broken, raw, st.binary(max_size=64))
    named = ("run.yaml", "again.yaml", *_SECTIONS)
    return Parser(in_file("run.yaml", inputs), lambda: _written_back(run), named)


def _written_back(run: Path, overrides: Sequence[str] = ()) -> Any:
    """The settings of a run, which must be the same when they are written and read again."""
    config, again = load_run_config(run, overrides), run.with_name("again.yaml")
    save_run_config(config, again)
    if load_run_config(again).model_dump() != config.model_dump():
        raise AssertionError("settings written back are others")
    return config


def _is_run(path: Path) -> bool:
    # Configurations of the benchmarks get their data when they run.
    return path.parent.name != "bench" and "train" in yaml.safe_load(path.read_text())


def overrides(folder: Path) -> Parser:
    """Settings on the command line, kept in a JSON file."""
    run, given = folder / "run.yaml", folder / "overrides.json"
    run.write_bytes((_CONFIGS / "qwen3_vl" / "lora.yaml").read_bytes())
    given.write_text('["train.seed=3"]')
    right = [
        "train.seed=1", "train.learning_rate=1e-4", "data.max_length=512", "train.warmup_steps=1",
        "model.freeze=[vision]", "model.lora.r=8", "parallel.dp_degree=1", "train.output_dir=a",
        "logging.logging_steps=5", "data.train=[{path: a, weight: 2}]", "data={train: [a]}",
    ]  # fmt: skip
    names = [
        *(text.partition("=")[0] for text in right), "model", "data.train.path", "x.y", "train.",
        "train.seeed", "", ".", "train..seed", ".".join("a" * 100), "data.train[0]",
    ]  # fmt: skip
    name = st.one_of(st.sampled_from(names), st.sampled_from(ODD_TEXTS), st.text(max_size=10))
    tokens = st.sampled_from(_YAML_TOKENS).map(lambda token: token.decode("latin-1"))
    value = st.one_of(
        odd_values.map(lambda v: as_json(v).decode()), odd_values.map(str), tokens,
        st.sampled_from(["1", "0.1", "true", "[a, b]", "{a: 1}", "1e-4", "null", ""]),
    )  # fmt: skip
    equals = st.sampled_from(["=", "=", "=", "=", "=", "", "=="])
    known = st.tuples(st.sampled_from(names), st.just("="), value).map("".join)
    odd = st.tuples(name, equals, value).map("".join)
    one = st.integers(0, 9).flatmap(
        lambda n: odd if n < 2 else known if n < 5 else st.sampled_from(right)
    )
    many = st.lists(one, min_size=1, max_size=3).map(as_json)
    parse = lambda: load_run_config(run, json.loads(given.read_text()))  # noqa: E731
    return Parser(in_file("overrides.json", many), parse, ("command line", *_SECTIONS))


def settings(folder: Path) -> Parser:
    """Any YAML value for any setting of any family.

    What the settings' types and rules accept goes on to the rules about files and, for Qwen3-VL,
    to processor and data, which must not fail on a value that should have been refused before.
    """
    given = folder / "given.json"
    runs = {"qwen": write_tiny_run(folder), "pi07": folder / "pi07.yaml"}
    runs["pi07"].write_bytes((_CONFIGS / "pi07" / "tiny_cpu.yaml").read_bytes())
    given.write_bytes(as_json(["qwen", ["train.seed=3"]]))
    names = {
        key: [*setting_descriptions(settings_class_of(read_yaml(runs[key])[0]))] for key in runs
    }

    def parse() -> None:
        key, overrides = json.loads(given.read_text())
        config = _written_back(runs[key], overrides)
        if key == "qwen":
            raise_problems(launch_problems(config, "cpu"))
            run_family(config)

    # Paths to files outside of the folder are right in a run.
    near = lambda text: not ("/" in text or "\\" in text or text.strip("'\" []") in (".", ".."))  # noqa: E731
    odd = [
        [as_json(each).decode() for each in kind] for kind in (ODD_VALUES, ODD_NUMBERS, ODD_TEXTS)
    ]
    kinds = [*([*filter(near, kind)] for kind in odd), *_YAML_VALUES]

    def chosen(number: int) -> bytes:
        # hypothesis repeats itself in choices among hundreds of names and values.
        draw = random.Random(number)
        key = draw.choice([*runs])
        return as_json([key, [f"{draw.choice(names[key])}={draw.choice(draw.choice(kinds))}"]])

    named = ("command line", "qwen.yaml", "run.yaml", "pi07.yaml", *_SECTIONS)
    inputs = st.integers(0, 1 << 48).map(chosen)
    return Parser(in_file("given.json", inputs), parse, named)


def metrics(folder: Path, *, with_pictures: bool = False) -> Parser:
    """metrics.jsonl, read into the page of a report."""
    _write_run(folder)
    inputs = in_file("metrics.jsonl", json_lines(_LINES, most_lines=5))
    parse = lambda: write_report([folder], folder / "report", with_pictures=with_pictures)  # noqa: E731
    return Parser(inputs, parse, ("metrics.jsonl",))


def pictures(folder: Path) -> Parser:
    """metrics.jsonl, read into the pictures of a report."""
    return metrics(folder, with_pictures=True)


def run_record(folder: Path) -> Parser:
    """run.json and config.yaml of a finished run, read into the page of a report."""
    _write_run(folder)
    seeds = [{"starts": [_START]}, {"starts": [_START, _RESUMED]}, {"starts": []}]
    record = json_bytes(seeds)
    config = st.one_of(mutated([_SETTINGS]).map(_as_yaml), st.just(_as_yaml(_SETTINGS)))
    inputs = st.fixed_dictionaries({"run.json": record, "config.yaml": config})
    parse = lambda: write_report([folder], folder / "report", with_pictures=False)  # noqa: E731
    return Parser(inputs, parse, ("run.json", "config.yaml"))


def _write_run(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in _LINES))
    (folder / "config.yaml").write_bytes(_as_yaml(_SETTINGS))
    (folder / "run.json").write_bytes(as_json({"starts": [_START]}))
