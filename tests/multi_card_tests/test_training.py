"""Full training runs of Qwen3-VL under topologies of several axes, against the same run file and
global batch on one device. `tests/routes` has those of one axis.

Guarantees, on micro-batches of different lengths, with two images, with one and with none:

- loss, gradient norm, evaluation loss, generated answers, their scores, the best evaluation and
  every parameter and moment after four optimizer steps are equal;
- a resumed run is bit-identical under the same topology;
- another topology continues, and every rank writes a part of the checkpoint, none all of it;
- ranks with nothing to train keep in step, and steps that reach nothing trained update nothing.
"""

import json
import shutil
from pathlib import Path

import pytest

from paddle_vl.checkpoint.manifest import Manifest
from paddle_vl.train.checkpoint import STATE_FILE
from tests.single_card_tests.train.tiny_run import MODEL as TINY_MODEL
from tests.support.finished_runs import (
    arrays_of,
    assert_close,
    assert_same_answers,
    metrics_of,
)
from tests.support.launch import launch
from tests.support.topology_runs import (
    CP,
    DAMPED,
    PP,
    RESUME,
    SHARDING,
    SP,
    STAGE_3,
    EqualsOneDevice,
    batch_settings,
    train,
    write_mixed_run,
)

pytestmark = pytest.mark.heavy
OVERLAP = (
    "parallel.fleet.sharding_configs={comm_overlap: true, enable_fuse_optimizer_states: true}",
    "parallel.sharding_gather_overlap=true",
    "train.recompute=full",
)
MP2, PP4 = ("parallel.mp_degree=2", *SP), ("parallel.pp_degree=4",)
VIRTUAL = ("parallel.num_virtual_stages=2",)
# The same samples in twice as many micro-batches.
HALVES = ("train.gradient_accumulation_steps=8", "train.per_device_train_batch_size=2")
# As on GPUs.
BATCHED = "parallel.fleet.pp_configs={use_batch_p2p_comm: true}"
TOPOLOGIES = {
    "mp2 pp2": (4, [*MP2, *PP]),
    "mp2 pp2 dualpipev": (4, [*MP2, *PP, "parallel.pp_schedule=dualpipev"]),
    "pp4 interleaved": (4, [*PP4, *VIRTUAL, *HALVES]),
    "pp4 fthenb, reserved": (
        4,
        [*PP4, *VIRTUAL, "parallel.pp_schedule=fthenb", "parallel.pp_visual_rows=64"],
    ),
    "pp4 balanced memory": (4, [*PP4, *VIRTUAL, "parallel.pp_schedule=balanced_memory"]),
    "sharding2 pp2 with overlap": (4, [*SHARDING, *PP, *OVERLAP]),
    "dp2 sharding2 stage 3, kept": (
        4,
        ["parallel.dp_degree=2", *SHARDING, STAGE_3, "parallel.reshard_after_forward=false"],
    ),
    "cp2 of sharding4 stage 3": (
        4,
        ["parallel.sharding_degree=4", *CP[1:], STAGE_3, "train.recompute=mlp"],
    ),
    "dp2 mp2 pp2 with batched messages": (8, ["parallel.dp_degree=2", *MP2, *PP, BATCHED]),
}
# The tower's three feature levels cross two boundaries of interleaved stages.
MODEL = TINY_MODEL | {
    "text_config": TINY_MODEL["text_config"] | {"num_hidden_layers": 8},
    "vision_config": TINY_MODEL["vision_config"]
    | {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]},
}


def common(run_file: Path) -> list[str]:
    return [
        f"data.eval=[{run_file.with_name('test.jsonl')}]",
        *("train.save_steps=2", "train.eval_steps=2", *DAMPED),
        *("train.gradient_accumulation_steps=4", "train.per_device_eval_batch_size=1"),
        "train.eval={max_new_tokens: 5}",
        "train.best={metric: exact_match, mode: min, load_at_end: true}",
    ]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_mixed_run(tmp_path_factory.mktemp("run"), 24, MODEL)


class TestQwen3VL(EqualsOneDevice):
    topologies = TOPOLOGIES

    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        return [*common(run_file), *batch_settings(num_data_parts)]

    def test_generated_answers_and_the_best_evaluation_are_those_of_one_device(
        self, several, one_device
    ):
        assert len({*assert_same_answers(several, one_device)}) > 1
        best, same = (
            json.loads((run / "checkpoint-4" / STATE_FILE).read_text())["best"]
            for run in (several, one_device)
        )
        assert best == same
        finals = [run / "final" for run in (several, one_device)]
        assert [Manifest.read(final).step for final in finals] == [best["step"]] * 2
        assert_close(*(arrays_of(final, ("model",)) for final in finals))


@pytest.fixture(scope="module")
def one_device(run_file, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("one") / "out"
    train(run_file, output_dir, [*common(run_file), *batch_settings(1)])
    return output_dir


def test_another_topology_continues_what_all_processes_wrote(run_file, one_device, tmp_path):
    first, then = tmp_path / "first", tmp_path / "then"
    parts = [*MP2, *PP]
    launch(
        train,
        4,
        arguments=(str(run_file), str(first), [*common(run_file), *batch_settings(1), *parts]),
    )
    file = Manifest.read(first / "checkpoint-2").files["model.safetensors"]
    assert len(file.pieces) == 4
    assert max(piece.length for piece in file.pieces) < file.size / 2
    for folder in ("checkpoint-2", "final"):  # final/ has the best model so far
        shutil.copytree(first / folder, then / folder)
    other = ["parallel.dp_degree=2", *SHARDING, STAGE_3, *batch_settings(4)]
    other += [RESUME]
    launch(train, 4, arguments=(str(run_file), str(then), [*common(run_file), *other]))
    assert_close(arrays_of(then / "checkpoint-4"), arrays_of(one_device / "checkpoint-4"))


@pytest.mark.parametrize("topology", [[*PP], [*SHARDING, STAGE_3]], ids=str)
def test_processes_with_nothing_to_train_keep_in_step(run_file, tmp_path, topology):
    """The ranks hold a frozen pipeline stage, or frozen sharding units."""
    one, two = tmp_path / "one", tmp_path / "two"
    frozen = "model.freeze=['model.language_model.*']"
    train(str(run_file), str(one), [*common(run_file), *batch_settings(1), frozen])
    parts = 2 if topology[0] in SHARDING else 1
    overrides = [*common(run_file), *batch_settings(parts), *topology, frozen]
    launch(train, 2, arguments=(str(run_file), str(two), overrides))
    assert_close(arrays_of(two / "checkpoint-4"), arrays_of(one / "checkpoint-4"))


@pytest.mark.parametrize(
    "topology",
    [("parallel.dp_degree=2",), SHARDING, (*PP, "parallel.schedule=colocated")],
    ids=str,
)
def test_steps_of_text_leave_a_tower_as_it_was(run_file, tmp_path, topology):
    """On one device too, where no parameter has a gradient."""
    text = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "text.jsonl").write_text((json.dumps({"messages": text}) + "\n") * 8)
    given = [f"data.train=[{tmp_path}/text.jsonl]", "model.freeze=['model.language_model.*']"]
    given += ["train.max_steps=2", "train.weight_decay=0.1", "train.warmup_steps=0"]
    given += ["train.gradient_accumulation_steps=2"]
    one, two = tmp_path / "one", tmp_path / "two"
    train(str(run_file), str(one), [*given, *batch_settings(1), "train.save_steps=1"])
    first, last = (arrays_of(one / f"checkpoint-{step}") for step in (1, 2))
    assert_close(last, first)
    assert not any(array.any() for name, array in last.items() if name.endswith("moment1"))
    parts = 2 if topology[0] in (SHARDING[0], "parallel.dp_degree=2") else 1
    arguments = (str(run_file), str(two), [*given, *batch_settings(parts), *topology])
    launch(train, 2, arguments=arguments)
    assert_close(arrays_of(two / "checkpoint-2"), last)
    assert [line["grad_norm"] for line in metrics_of(two)] == [0.0, 0.0]
