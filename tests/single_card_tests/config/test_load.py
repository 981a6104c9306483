"""Reading a run's configuration: limits, names that are no setting, and values that do not fit."""

import ast
import time
from pathlib import Path

import pytest

import paddle_vl
from paddle_vl.config import bounded_yaml
from paddle_vl.config.family_settings import settings_classes, settings_help
from paddle_vl.config.load import load_run_config, save_run_config
from paddle_vl.config.peer_names import NOT_NEEDED, PEERS, setting_for
from paddle_vl.config.section import setting_descriptions
from paddle_vl.config.validate import launch_problems
from paddle_vl.families.vlm.grpo.rewards import Rewards
from paddle_vl.families.vlm.settings import VLRun
from paddle_vl.parallel import fleet_strategy
from paddle_vl.parallel.degrees import TopologyPlan, plan_problems
from paddle_vl.train.layout import parallel_degrees

CONFIGS = Path(__file__).parents[3] / "configs"
MINIMAL = """\
model:
  pretrained: some/model
data:
  train: [train.jsonl]
train:
  output_dir: runs/a
  max_steps: 4
"""


@pytest.fixture
def write(tmp_path):
    def _write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def problems(path: Path, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        load_run_config(path, overrides)
    return str(caught.value)


def all_descriptions() -> dict[str, tuple[str, str]]:
    return {name: text for _, _, group in settings_help() for name, text in group.items()}


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("2.5E-5", 2.5e-5), ("1", 1.0), (".5", 0.5), ("3e2", 300.0)]
)
def test_learning_rate_is_read_as_a_number(write, text, value):
    from_file = load_run_config(write(MINIMAL + f"  learning_rate: {text}\n"))
    from_line = load_run_config(write(MINIMAL), [f"train.learning_rate={text}"])
    assert from_file.train.learning_rate == from_line.train.learning_rate == value


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.learing_rate=1", "did you mean train.learning_rate?"),
        ("train.num_workers=2", "did you mean data.num_workers?"),
        ("parallel.qqq=2", "parallel has dp_degree, mp_degree, pp_degree, sharding_degree"),
        ("optim={}", "the sections are model, data, parallel, train, logging"),
    ],
)
def test_unknown_key_names_place_and_nearest_setting(write, override, part):
    message = problems(write(MINIMAL), override)
    assert message.startswith(f"command line: {override.partition('=')[0]} is not a setting; ")
    assert part in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model.compute_dtype={a: 1}", "is {\"a\": 1}; it must be 'float32' or"),
        ('data.processor=""', 'data.processor is ""; it must name a file or folder'),
        ('model.pretrained=" "', 'model.pretrained is " "; it must name a file or folder'),
        ('data.train=[""]', 'data.train[0] is ""; it must name a file or folder'),
        ('data.train=[{path: ""}]', 'data.train[0].path is ""; it must name a file or folder or'),
        ("data.train=[{path: 3}]", "data.train[0].path is 3; it must be a text or"),
        ("data.train=[{path: a, columns: {b: 3}}]", "data.train[0].columns.b is 3; it must"),
        ("train.max_steps='4'", 'train.max_steps is "4"; it must be a whole number'),
        ("train.seed=true", "train.seed is true; it must be a whole number"),
        ("data.train=3", "data.train is 3; it must be a list"),
        ("data.train=[1]", "data.train[0] is 1; it must be a text"),
        ("model.config=3", "model.config is 3; it must be a text or it must be"),
        ("train.learning_rate=.nan", "train.learning_rate is NaN; it must be a finite number"),
        ("train.recompute=some", "it must be 'none', 'act', 'attention', 'mlp' or 'full'"),
        ("train.max_steps=0", "train.max_steps is 0; it must be at least 1"),
        ("train.max_steps.x=1", "train.max_steps.x lies inside train.max_steps, which is 4"),
        ("max_steps", "'max_steps' is not an override; write section.name=value"),
        ("train.\udcff=1", r"the name in 'train.\udcff=1' is not UTF-8 text"),
        ("\ud800=", r"the name in '\ud800=' is not UTF-8 text"),
    ],
)
def test_wrong_value_is_named(write, override, part):
    message = problems(write(MINIMAL), override)
    assert message.startswith("command line: ")
    assert part in message


@pytest.mark.parametrize("family", ["qwen3_vl/one_card.yaml", "pi07/tiny_cpu.yaml"])
def test_every_setting_takes_or_refuses_a_value_of_any_type(family):
    path = CONFIGS / family
    described = setting_descriptions(type(load_run_config(path)))
    sections = {name.rpartition(".")[0] for name in described}
    names = [name for name in described if name not in sections]
    told = {}
    for value in ("{a: 1}", "[[1]]", "[{a: 1}]", "''", "2026-01-01", "!!binary aGk=", "!!set {a}",
                  ".nan", "3", "0.5", "true", "text", "null"):  # fmt: skip
        told[value] = problems(path, *(f"{name}={value}" for name in names))
        assert "command line: " in told[value]
    blank = {line.split()[3] for line in told["''"].splitlines() if "must name a file" in line}
    assert {"model.pretrained", "data.processor", "train.output_dir"} <= blank


def test_missing_setting_is_named_with_its_description(write):
    message = problems(write(MINIMAL.replace("  output_dir: runs/a\n", "")))
    assert "run.yaml:5: train.output_dir is missing (folder for checkpoints" in message


def test_all_problems_are_reported_together(write):
    message = problems(write(MINIMAL + "  sed: 1\n  warmup_steps: x\n  max_steps: 9\n"), "a=1")
    assert message.startswith("4 problems in the configuration:")
    for part in (
        "run.yaml:8: train.sed",
        "train.warmup_steps",
        "train.max_steps is set a second time (first in line 7)",
        "a is",
    ):
        assert part in message


def test_thousands_of_unknown_keys_are_reported_briefly_and_fast(write):
    keys = "".join(f"  key_number_{number}: 1\n" for number in range(3_000))
    begin = time.process_time()
    message = problems(write(MINIMAL + keys))
    assert time.process_time() - begin < 5
    assert message.startswith("101 problems in the configuration:")
    assert message.endswith("run.yaml: 2900 more settings are wrong")


def test_long_name_is_reported_briefly_and_fast(write):
    begin = time.process_time()
    message = problems(write(MINIMAL), "train." + "max_steps" * 10_000 + "=1")
    assert time.process_time() - begin < 2
    assert "... is not a setting; " in message
    assert len(message) < 2000


INLINE = MINIMAL.replace("pretrained: some/model", "config: {text_config: {hidden_size: 8}}")


@pytest.mark.parametrize(
    ("text", "overrides", "name", "value"),
    [
        (MINIMAL, [], "train.max_steps", 4),
        (MINIMAL, [], "data.padding_side", "right"),
        (MINIMAL, ["train.max_steps=5", "train.max_steps=6"], "train.max_steps", 6),
        (MINIMAL + "logging:\n", ["logging.logging_steps=3"], "logging.logging_steps", 3),
        (
            INLINE, ["model.config.text_config.hidden_size=16", "data.processor=p"],
            "model.config", {"text_config": {"hidden_size": 16}},
        ),
    ],
)  # fmt: skip
def test_overrides_win_over_the_file_and_both_are_saved(
    write, tmp_path, text, overrides, name, value
):
    config = load_run_config(write(text), overrides)
    section, setting = name.split(".")
    assert getattr(getattr(config, section), setting) == value
    save_run_config(config, tmp_path / "config.yaml")
    assert load_run_config(tmp_path / "config.yaml") == config
    with pytest.raises(ValueError, match="frozen"):
        config.train.max_steps = 3


def test_broken_files_are_reported(write, tmp_path):
    assert "is not valid YAML" in problems(write("model: [\n"))
    assert "a configuration has the sections" in problems(write("- 1\n"))
    with pytest.raises(RuntimeError, match=r"none\.yaml cannot be read"):
        load_run_config(tmp_path / "none.yaml")


def test_every_setting_has_a_description():
    descriptions = all_descriptions()
    assert len(descriptions) > 80
    assert all(text and len(text) > 8 for _, text in descriptions.values())
    plain = {"model", "data", "parallel", "train", "logging"}
    for run in settings_classes():
        for name, section in run.model_fields.items():
            for setting in section.annotation.model_fields:
                assert f"{name}.{setting}" in descriptions
        assert set(run.model_fields) - {"preference", "grpo"} == plain


def test_fixed_settings_exist():
    for run in settings_classes():
        assert set(run.fixed_settings) <= setting_descriptions(run).keys()


def test_every_setting_is_read_somewhere():
    """A setting that no code outside the configuration reads as an attribute has no effect."""
    package = Path(paddle_vl.__file__).parent
    # `fleet_problems` reads the sections by name; the encoder's cp_degree has one value. Data sets
    # of a mixture inherit settings, which `setting` reads by name.
    read = {*fleet_strategy._SECTIONS, "cp_degree"}
    for path in package.rglob("*.py"):
        if path.name != "schema.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            nodes = list(ast.walk(tree))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            calls = [n for n in nodes if isinstance(n, ast.Call) and len(n.args) == 2]
            inherited = [c for c in calls if getattr(c.func, "attr", None) == "setting"]
            read |= {ast.literal_eval(call.args[1]) for call in inherited}
    assert {name.rpartition(".")[2] for name in all_descriptions()} <= read


@pytest.mark.parametrize(
    "path",
    # Files in configs/bench get their data from the benchmark; those in suites are no runs.
    sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name not in ("bench", "suites")),
    ids=lambda path: path.name,
)
def test_every_example_loads_and_its_ranks_add_up(path):
    config = load_run_config(path)
    launched = {"digits_4_processes": 4, "eight_gpus": 8, "one_node_8_gpus": 8, "two_nodes": 16}
    launched |= {"mixture_64_gpus": 64, "grpo_8_gpus": 8}
    launched |= {"lora_8_gpus": 8, "frozen_table_64_gpus": 64}
    multiple = config.data.pad_to_multiple_of if isinstance(config, VLRun) else None
    plan = TopologyPlan(
        parallel_degrees(config), launched.get(path.stem, 1), pad_to_multiple_of=multiple
    )
    assert plan_problems(plan) == []
    if isinstance(config, VLRun) and config.learns_from_rewards:
        assert Rewards(config.grpo).names


@pytest.fixture
def minimal_file(write):
    return write(MINIMAL)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("train.lr", "train.learning_rate"),
        ("learning_rate", "train.learning_rate"),
        ("train.gradient-checkpointing", "train.recompute=full"),
        ("model.lora.lora_rank", "model.lora.r"),
        ("moe_expert_capacity_factor", "parallel.expert_capacity_factor"),
        ("data.max_lenght", "data.max_length"),
        ("train_dataset_type", "data.format"),
        ("fine_tuning", "model.lora"),
    ],
)
def test_name_of_another_trainer_leads_to_the_setting(minimal_file, name, setting):
    told = f"command line: {name} is not a setting; did you mean {setting}?"
    lora = "model.lora.target_modules=all-linear"
    assert told in problems(minimal_file, f"{name}=1", *[lora] * name.startswith("model.lora"))


def test_name_of_another_trainer_that_has_no_setting_is_told_why(minimal_file):
    told = {"template": "the chat template is the one in", "save_to_hf": "in HF's format"}
    for name, reason in told.items():
        message = problems(minimal_file, f"{name}=1")
        assert message.startswith(f"command line: {name} is not a setting; ")
        assert reason in message
        assert message.endswith(": leave it out")
    known = all_descriptions()
    names = [name for names in NOT_NEEDED.values() for name in names.split()]
    assert not {*names} & {*known, *(name for each in PEERS.values() for name in each.split())}


def test_section_of_another_trainer_leads_to_the_settings(minimal_file):
    message = problems(minimal_file, "optimizer={lr: 1, weight_decay: 0, x: 3}")
    told = "train.learning_rate for optimizer.lr, train.weight_decay for optimizer.weight_decay?"
    assert message == f"command line: optimizer is not a setting; did you mean {told}"


def test_names_of_other_trainers_lead_to_settings_that_exist():
    known = all_descriptions()
    for setting, names in PEERS.items():
        assert setting.partition("=")[0] in known
        for name in names.split():
            assert name not in known
            assert setting_for(name, known) == setting
    # Names that resemble a setting of another section by chance lead nowhere.
    assert [setting_for(name, known) for name in ("train.rnk", "optim")] == [None] * 2


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model.freeze=[visoin]", "model.freeze: no part of the model is called 'visoin'; did you "
         "mean vision? (the parts are vision, mergers, language)"),
        ("train.part_learning_rates={languag: 0.1}", "did you mean language?"),
        ("model.lora={target_modules: all-linear, modules_to_save: [merger]}",
         "model.lora.modules_to_save: no part of the model is called 'merger'; did you mean merg"),
    ],
)  # fmt: skip
def test_misspelt_part_of_the_model_is_refused_when_the_file_is_read(minimal_file, override, part):
    assert part in problems(minimal_file, override)


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
def test_hostile_files_are_refused_by_name(minimal_file, text, named):
    minimal_file.write_bytes(text)
    with pytest.raises(ValueError, match=rf"(?s)run\.yaml.*{named}"):
        load_run_config(minimal_file)


@pytest.mark.parametrize("text", [lists(), merges()], ids=["lists", "merges"])
def test_files_that_expand_are_refused_before_values_are_made(minimal_file, text, monkeypatch):
    monkeypatch.setattr(bounded_yaml, "_MAX_VALUES", 500)
    monkeypatch.setattr(bounded_yaml._Loader, "construct_document", None)
    minimal_file.write_text(text)
    with pytest.raises(ValueError, match="expanded this has more than 500 values"):
        load_run_config(minimal_file)


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
def test_hostile_overrides_name_the_command_line(minimal_file, override, named):
    message = problems(minimal_file, override)
    assert message.startswith("command line: ")
    assert named in message
    assert "run.yaml" not in message
    assert len(message) < 1000


def test_padding_beyond_the_longest_row_is_refused(minimal_file):
    assert "exceeds the longest row of 2048" in problems(
        minimal_file, "data.pad_to_multiple_of=4096"
    )
    assert (
        load_run_config(minimal_file, ["data.pad_to_multiple_of=2048"]).data.pad_to_multiple_of
        == 2048
    )


@pytest.mark.parametrize("inside", ["", "runs"])
def test_output_dir_that_is_a_file_or_inside_one_is_refused(minimal_file, inside):
    config = load_run_config(minimal_file, [f"train.output_dir={minimal_file / inside}"])
    problems = launch_problems(config, "cpu")
    assert any(f"{minimal_file} is a file, not a folder" in problem for problem in problems)
