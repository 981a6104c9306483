"""The figures of the benchmarks are times of what they name.

Guarantees: times that `step.py`, `colocated.py`, `answers.py`, `rewards.py`, `export.py` and
`checkpoint.py` report are within a factor of 20 of another clock's around the same calls, which a
wrong unit, a wrong divisor or two clocks would miss; the first answer, which warms up, is not among
them.
"""

import json
import textwrap
import time
from itertools import islice
from typing import Any

import pytest

import colocated
import harness
import references
from tests.support import forked
from tests.support.launch import launch

FACTOR = 20
PRELUDE = """
    import functools, json, statistics, sys, time
    import answers, harness, references, step
    from pathlib import Path

    def watched(owner, name):
        spent, call = [], getattr(owner, name)
        @functools.wraps(call)
        def timed(*args, **kwargs):
            begin = time.monotonic_ns()
            try:
                return call(*args, **kwargs)
            finally:
                spent.append((time.monotonic_ns() - begin) / 1e9)
        setattr(owner, name, timed)
        return spent

    def small(settings):
        config = settings["model"]["config"]
        text, vision = config.get("text_config", config), config["vision_config"]
        text |= {"num_hidden_layers": 1} | ({"layer_types": ["full_attention"]}
                                            if "layer_types" in text else {})
        vision["depth" if "depth" in vision else "num_hidden_layers"] = 1
        vision |= ({"deepstack_visual_indexes": [0]}
                   if "deepstack_visual_indexes" in vision else {})
        return settings
"""


def figures(program: str, work) -> dict[str, tuple[float, float]]:
    """What a program prints: of each figure the benchmark's number and the other clock's."""
    text = textwrap.dedent(PRELUDE) + textwrap.dedent(program)
    done = forked.run(["-c", text, str(work)])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict[str, tuple[float, float]]) -> None:
    assert found
    for name, (figure, clock) in found.items():
        assert clock / FACTOR < figure < clock * FACTOR, (name, figure, clock)


@pytest.mark.parametrize("family", ["qwen3_vl", "paddleocr_vl"])
def test_a_step_takes_as_long_as_the_clock_says(family, digits, tmp_path):
    if family == "qwen3_vl":
        (tmp_path / "data").symlink_to(digits)
    else:
        harness.make_data(family, tmp_path / "data")
    program = f"""
        import yaml
        from paddle_vl.train.trainer import Trainer

        work = Path(sys.argv[1])
        config = small(yaml.safe_load(step.CONFIGS["{family}"].read_text()))
        (work / "config.yaml").write_text(yaml.safe_dump(config))
        step.CONFIGS["{family}"] = work / "config.yaml"
        spent = watched(Trainer, "train_one_step")
        found = step.measure("{family}", str(work), 1, 2, [], compiles=True)["seconds"]
        clock = statistics.median(spent[step.WARM_UP:])
        parts = sum(found[name] for name in step.PHASES)
        pairs = {{"step": found["step"], "cpu": found["cpu"], "phases": parts}}
        print(json.dumps({{name: (figure, clock) for name, figure in pairs.items()}}))
    """
    check(figures(program, tmp_path))


def a_rank_of_colocated(given: dict[str, Any]) -> dict[str, float]:
    """The benchmark's numbers of this rank, and the seconds of its steps by another clock."""
    from paddle_vl.train.trainer import Trainer

    spent, turn = [], Trainer.turn

    def timed(trainer: Trainer) -> None:
        begin = time.monotonic_ns()
        turn(trainer)
        spent.append((time.monotonic_ns() - begin) / 1e9)

    Trainer.turn, colocated.WARM_UP = timed, 1
    found = colocated.measure(str(given["config"]), given["settings"], given["steps"])
    return found | {"clock": min(spent[colocated.WARM_UP + 1 :])}


def test_a_colocated_step_takes_as_long_as_the_clock_says(digits, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    for name in ("images", "processor"):
        (tmp_path / "data" / name).symlink_to(digits / name)
    with (digits / "train.jsonl").open() as lines:
        (tmp_path / "data" / "train.jsonl").write_text("".join(islice(lines, 100)))

    def launched(function: Any, folder: Any, ranks: int, **given: Any) -> list[dict[str, float]]:
        assert function is colocated.measure
        return launch(a_rank_of_colocated, ranks, arguments=(given,))

    monkeypatch.setattr(harness, "launch", launched)
    monkeypatch.setattr(colocated, "TOWERS", {1: (2, 64, 64)})
    monkeypatch.setattr(colocated, "MICRO_BATCHES", 2)
    monkeypatch.setattr(colocated, "MOST", (*colocated.MOST, "clock"))
    found = colocated.trained(1, "colocated", tmp_path, 2)
    check({"step": (found["milliseconds"] / 1e3, found["clock"])})


@pytest.mark.parametrize(
    ("side", "owner", "first", "further"),
    [
        ("MODEL", "families.vlm.answering.generate:_CachedDecoder", "prefill", "advance"),
        ("ENGINE", "families.vlm.answering.batched:BatchedModel", "prefill", "advance"),
    ],
)
def test_an_answer_takes_as_long_as_the_clock_says(side, owner, first, further, tmp_path):
    program = f"""
        from importlib import import_module

        read = answers.settings_of
        answers.settings_of = lambda family: small(read(family))
        references.PROMPTS, references.RUNS = (1, 2), 2
        module, name = "{owner}".split(":")
        owner = getattr(import_module("paddle_vl." + module), name)
        firsts, furthers = watched(owner, "{first}"), watched(owner, "{further}")
        found = answers.measure("qwen3_vl", answers.{side}, "", 1, 4, {{}})["seconds"]
        clocks = {{"first": statistics.median(firsts), "next": statistics.median(furthers)}}
        assert set(found) == {{f"{{w}} of {{n}}" for w in clocks for n in (1, 2)}}
        print(json.dumps({{n: (found[n], clocks[n.split()[0]]) for n in found}}))
    """
    check(figures(program, tmp_path))


def test_an_update_of_rewards_takes_as_long_as_the_clock_says(digits, tmp_path):
    (tmp_path / "data").symlink_to(digits)
    program = """
        import rewards
        from paddle_vl.train.trainer import Trainer

        read = answers.settings_of
        answers.settings_of = lambda family: small(read(family))
        given = rewards.write_inputs(sys.argv[1], 1, 4)
        spent = watched(Trainer, "train_one_step")
        found = rewards.measure(sys.argv[1], 1)
        tokens = found["tokens"]
        assert given["rows"] <= tokens <= 4 * given["rows"]
        clock = statistics.median(spent[references.WARM_UP:])
        print(json.dumps({name: (tokens / found[name], clock) for name in ("cpu", "clock")}))
    """
    check(figures(program, tmp_path))


def test_actions_take_as_long_as_the_clock_says(tmp_path):
    harness.make_data("pi07", tmp_path / "data")
    program = """
        import export
        from paddle_vl.families.pi07.policy import PI07LowLevelPolicy

        spent = watched(PI07LowLevelPolicy, "sample_actions")
        found = export.measure(export.DYNAMIC, sys.argv[1], 1, 1)["seconds"]
        clock = statistics.median(spent)
        print(json.dumps({case: (each, clock) for case, each in found.items()}))
    """
    check(figures(program, tmp_path))


def test_a_checkpoint_takes_as_long_as_the_clock_says(tmp_path):
    program = """
        import checkpoint as bench
        from paddle_vl.config.schema import TrainConfig

        bench.WIDTH, config = 512, TrainConfig(output_dir=sys.argv[1], async_save=False)
        saves, checks = watched(bench.CheckpointWriter, "save"), watched(bench, "damaged_files")
        training = bench.Training(4, config)
        training.step()
        ((times,), folder) = bench.saved(training, config, Path(sys.argv[1]), 1, 1)
        rates = bench.verification(folder)
        pairs = {"stall": (times["stall_s"], saves[-1])}
        for name, clock in zip(("disk", "memory"), checks, strict=True):
            rate = rates[f"verified_from_{name}_gb_per_s"]
            pairs[name] = (rates["bytes"] / 1e9 / rate, clock)
        print(json.dumps(pairs))
    """
    check(figures(program, tmp_path))


def test_the_least_of_the_answers_behind_the_first_counts():
    runs = [[0.0, 90.0, 180.0, 270.0], [10.0, 12.0, 13.0, 14.0], [20.0, 21.0, 24.0, 27.0]]
    assert references.least_of(runs, 8) == {"first of 8": 1.0, "next of 8": 1.0}
