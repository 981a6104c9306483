"""pi07's policy and planner under the colocated schedule, against one process.

Guarantees, with more, as many and fewer encoder lanes than data lanes, on samples with missing
cameras, dropped goals and dropped pasts, so that items and loss counts differ from step to step:

- each item is encoded once in the world, and by a frozen tower a step ahead;
- every gradient, the norm and every parameter after three SGD steps equal one process, with
  micro-batches fewer than and equal to the stages, recomputation, rows on the host, sequence
  parallelism, a frozen tower that reads ahead and a partly frozen one; gradients of the tower are
  not zero, and what is trained moves;
- dropout in the decoder draws the same numbers as under the plain schedule;
- a full run with AdamW equals one device: losses, norms, evaluations, parameters and moments; a
  resumed one is bit-identical; `final/` has its weights in one file; a plain run continues
  colocated, and a colocated one plain;
- errors that such a schedule may have are seen: no sum over the encoder's lanes, or one before
  phase 3, and rows whose gradient is summed over mp ranks that all have all of it.

Over 350 lines: all of it is about the steps of `sgd_steps` and their comparison.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import paddle
import pytest

from paddle_vl.checkpoint import writing
from paddle_vl.config.load import load_run_config
from paddle_vl.families.pi07.colocated import ImageItems
from paddle_vl.families.pi07.policy_model import PolicyModel
from paddle_vl.nn.adamw import gradient_of
from paddle_vl.parallel.colocated.runner import ColocatedRunner
from paddle_vl.train.build import build_trainer
from paddle_vl.train.colocated_optimizer import ColocatedOptimizer
from paddle_vl.train.schedule import seed_step
from paddle_vl.train.step import agree_on_step, train_step
from tests.single_card_tests.train.tiny_policy_run import MODEL, PLANNER, write_tiny_policy_run
from tests.support.finished_runs import arrays_of, assert_close, assert_one_file_of_weights
from tests.support.launch import launch
from tests.support.topology_runs import (
    DAMPED,
    GLOBAL_BATCH,
    RESUME,
    EqualsOneDevice,
    num_data_parts,
    train,
    train_and_resume,
)

COLOCATED = "parallel.schedule=colocated"
PP2, DP2, MP2 = (f"parallel.{axis}_degree=2" for axis in ("pp", "dp", "mp"))
STATE, RECOMPUTE = "parallel.encoder.sharding_stage=1", "train.recompute=full"
OFFLOAD = "parallel.encoder.offload_rows=true"
SP = (MP2, "parallel.sequence_parallel=true")
AGREES = "parallel.branch_sync=all_reduce"
FROZEN, PARTLY = "model.freeze=[vision]", "model.freeze=['*vision_model.encoder.layers.0.*']"
TOWER = {"hidden_size": 32, "num_attention_heads": 4}


def with_tower(model: dict, **settings: object) -> dict:
    """The model with a tower that four ranks divide, for data that may lack a camera."""
    model = deepcopy(model) | {"empty_cameras": 1} | settings
    model["vlm_config"]["gemma3_config"]["vision_config"].update(TOWER)
    return model


PLANS = f"model.config={json.dumps(with_tower(PLANNER))}"
DROPOUT = f"model.config={json.dumps(with_tower(MODEL, dropout=0.2))}"
FROZEN_BY_MODEL = f"model.config={json.dumps(with_tower(MODEL, freeze_vision_encoder=True))}"
RATE, STEPS = 0.05, 3
TOLERANCE = 1e-5
_TOWER, _PROJECTOR = ".vision_tower.", ".mm_input_projection_weight"


def encoder_mp(degree: int) -> str:
    return f"parallel.encoder.mp_degree={degree}"


def micro_batches(count: int, samples: int = GLOBAL_BATCH) -> list[str]:
    return [
        f"train.gradient_accumulation_steps={count}",
        f"train.per_device_train_batch_size={samples}",
    ]


TWO = micro_batches(2)
# World size -> name -> settings of all runs, layout.
SGD = {
    2: {
        "fan-in": (TWO, [PP2, RECOMPUTE]),
        "fan-in, fewer micro-batches": ([*micro_batches(1), AGREES], [PP2, STATE, OFFLOAD]),
        "equal": (TWO, [PP2, encoder_mp(2)]),
        "frozen tower": ([*TWO, FROZEN], [PP2]),
        "planner": ([*TWO, PLANS], [PP2]),
    },
    4: {
        "fan-in over two lanes": ([*TWO, AGREES], [PP2, DP2]),
        "equal, partly frozen": ([*TWO, AGREES, PARTLY], [PP2, DP2, encoder_mp(2)]),
        "fan-out": ([*TWO, AGREES], [PP2, DP2, encoder_mp(4)]),
        "sequence parallelism": (TWO, [PP2, *SP]),
    },
}
HEAVY = {
    2: {
        "frozen by the model's configuration": ([*TWO, FROZEN_BY_MODEL], [PP2, encoder_mp(2)]),
        "more micro-batches": (micro_batches(5, 2), [PP2]),
        "cost": (TWO, [PP2, "parallel.pp_split=cost"]),
        "dynamic": (TWO, [PP2, "parallel.pp_shapes=dynamic"]),
    },
    4: {
        "tensor parallelism": (TWO, [PP2, MP2, encoder_mp(2)]),
        "planner, fan-out": ([*TWO, AGREES, PLANS], [PP2, DP2, encoder_mp(4)]),
        "frozen, two lanes": ([*TWO, AGREES, FROZEN], [PP2, DP2]),
    },
}


@contextmanager
def stirred_tower() -> Iterator[None]:
    """The tower matters in the first step.

    A fresh projector is zero, and attention of a fresh tower this small is nearly uniform.
    """
    materialize = PolicyModel.materialize

    def materialized(self):
        keys = {id(item.parameter): item.key for item in self.stored_parameters()}
        for parameter in materialize(self):
            key = keys[id(parameter)]
            if key.endswith(_PROJECTOR):
                rng = np.random.default_rng(0)
                parameter.set_value(rng.standard_normal(parameter.shape, np.float32))
            elif _TOWER in key and key.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.set_value(20 * parameter)
            yield parameter

    PolicyModel.materialize = materialized
    try:
        yield
    finally:
        PolicyModel.materialize = materialize


def sgd_steps(run_file: Path, settings: list[str], breaks: Callable[[Any], None] | None = None):
    """Three steps with SGD in place of AdamW.

    Returns:
        Norms, counts, gradients `{names: array}` and parameters of this rank after each step.
    """
    config = load_run_config(run_file, settings)
    with stirred_tower():
        trainer = build_trainer(config, writes=False)
        optimizer, runner, ranks = trainer.optimizer, trainer.runner, trainer.ranks
        parts = optimizer.optimizers if isinstance(optimizer, ColocatedOptimizer) else [optimizer]
        table = runner.model.placement.parameter_table
        found = {"norms": [], "counts": [], "gradients": [], "parameters": []}
        # Items of this rank's data lane in each step, and those that each encoder forward encodes.
        found |= {"items": [], "encoded": []}
        if isinstance(runner, ColocatedRunner):
            encode = runner.encoder.encode

            def counted(batches, own):
                found["encoded"].append(sum(map(len, own)))
                return encode(batches, own)

            runner.encoder.encode = counted
        if breaks is not None:
            breaks(trainer)

        def update_of(part):
            def update(rate, norm, is_good):
                assert bool(is_good)
                for parameter, names in part._named:
                    tensor = part.store.shard_of(parameter)
                    gradient = gradient_of(tensor)
                    if gradient is not None and tensor is parameter:
                        full = table.full_value(parameter, gradient)
                        found["gradients"][-1]["|".join(names)] = full
                    if gradient is not None:
                        paddle.assign(tensor - RATE * gradient, tensor)
                part.store.all_gather_parameters()
                for parameter, names in part._named:
                    values = table.full_value(parameter)
                    found["parameters"][-1]["|".join(names)] = values

            return paddle.no_grad()(update)

        for part in parts:
            part.update = update_of(part)
        for step in range(STEPS):
            found["gradients"].append({})
            found["parameters"].append({})
            fed = trainer.feed.next_step()
            found["items"].append(
                sum(len(ImageItems.of(each.batch).places) for each in fed.micro_batches)
            )
            totals = agree_on_step(fed.micro_batches, runner.loss, ranks)
            seed_step(config.train.seed, step, ranks)
            outcome = train_step(runner, optimizer, fed.micro_batches, RATE, ranks, totals)
            found["norms"].append(outcome.grad_norm.item())
            found["counts"].append(totals.counts)
        trainer.feed.close()
    return found


def no_sum_over_lanes(trainer) -> None:
    trainer.ranks._sum_encoder_gradients = lambda tensors, encoder: None


def sum_before_phase_3(trainer) -> None:
    """The encoder's gradients are summed, and then its backward pass adds those of own items."""
    runner, ranks, total = trainer.runner, trainer.ranks, trainer.ranks._sum_encoder_gradients
    phase_3 = runner._backward
    tensors = [t for t in trainer.optimizer.tensors_with_specs if t[1].is_encoder]

    def after_the_sum(encoded, batches, trained):
        for parameter in trained:
            parameter.grad = paddle.zeros_like(parameter)
        total(tensors, runner.groups)
        phase_3(encoded, batches, trained)

    runner._backward = after_the_sum
    ranks._sum_encoder_gradients = lambda tensors, encoder: None


def rows_summed_over_mp(trainer) -> None:
    trainer.runner.bridge.gradient_group = trainer.runner.groups.lane_group


BROKEN = {
    2: {"no sum": ("fan-in", no_sum_over_lanes), "early sum": ("fan-in", sum_before_phase_3)},
    4: {"rows summed over mp": ("sequence parallelism", rows_summed_over_mp)},
}


def steps_on_ranks(run_file: Path, size: int, settings: list[str], layout: list[str], breaks=None):
    halves = [f"train.per_device_train_batch_size={GLOBAL_BATCH // 2}"] if DP2 in layout else []
    given = [*settings, *halves, COLOCATED, *layout]
    return launch(sgd_steps, size, arguments=(run_file, given, breaks))


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    path = write_tiny_policy_run(tmp_path_factory.mktemp("run"), 40, **with_tower(MODEL))
    file = path.with_name("arm-joint.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for number, record in enumerate(records):
        if number % 3 == 0:
            del record["camera1"]
            record.pop("subgoal1", None)
    lines = [json.dumps(record) + "\n" for record in records]
    file.write_text("".join(lines))
    path.with_name("few.jsonl").write_text("".join(lines[:5]))
    text = path.read_text().replace(
        "subgoal_drop_prob: 0.6", "subgoal_drop_prob: 0.6\n    history_state_drop_prob: 0.5"
    )
    assert "history_state" in text
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def references(run_file) -> Callable[[list[str]], dict]:
    """One process's steps, by settings."""
    made: dict[tuple[str, ...], dict] = {}

    def get(settings: list[str]) -> dict:
        if tuple(settings) not in made:
            made[tuple(settings)] = sgd_steps(run_file, settings)
        return made[tuple(settings)]

    return get


def errors_of(ranks: list[dict], wanted: dict) -> dict[str, float]:
    """Largest relative errors. Entries count against a floor, by the largest of tower or language
    model, since biases of keys have noise alone."""
    found = {"gradients": 0.0, "parameters": 0.0, "norms": 0.0}
    for kind in ("gradients", "parameters"):
        for step, expected in enumerate(wanted[kind]):
            largest = dict.fromkeys((True, False), 0.0)
            for name, value in expected.items():
                largest[_TOWER in name] = max(largest[_TOWER in name], np.abs(value).max())
            for rank in ranks:
                for name, value in rank[kind][step].items():
                    scale = max(np.abs(expected[name]).max(), 1e-3 * largest[_TOWER in name])
                    error = float(np.abs(value - expected[name]).max() / scale)
                    found[kind] = max(found[kind], error)
    for rank in ranks:
        pairs = zip(rank["norms"], wanted["norms"], strict=True)
        found["norms"] = max(found["norms"], *(abs(a / b - 1.0) for a, b in pairs))
    return found


def assert_equal_steps(ranks: list[dict], wanted: dict, shards_state: bool) -> None:
    for kind in ("gradients", "parameters"):
        for step, expected in enumerate(wanted[kind]):
            names = set().union(*(rank[kind][step] for rank in ranks))
            missing = {name for name in expected.keys() - names if _TOWER not in name}
            assert names <= expected.keys()
            # Gradients that are sharded with their state are in no single rank.
            assert names == expected.keys() or (shards_state and not missing), kind
    for rank in ranks:
        assert rank["counts"] == wanted["counts"]
    errors = errors_of(ranks, wanted)
    assert max(errors.values()) < TOLERANCE, errors


ALL = [
    *((size, name, False) for size, cases in SGD.items() for name in cases),
    *(
        pytest.param(size, name, True, marks=pytest.mark.heavy)
        for size, cases in HEAVY.items()
        for name in cases
    ),
]


@pytest.mark.parametrize(("size", "name", "is_heavy"), ALL)
def test_gradients_norm_and_parameters_equal_one_process(
    run_file, references, size, name, is_heavy
):
    settings, layout = (HEAVY if is_heavy else SGD)[size][name]
    ranks = steps_on_ranks(run_file, size, settings, layout)
    wanted = references(settings)
    assert_equal_steps(ranks, wanted, STATE in layout)
    if PLANS not in settings:
        assert len(set(wanted["counts"])) > 1
    first, last = wanted["parameters"][0], wanted["parameters"][-1]
    of_tower = 0
    for key, gradient in wanted["gradients"][-1].items():
        # A softmax ignores the biases of keys.
        if _TOWER in key and "k_proj.bias" not in key:
            of_tower += 1
            assert np.abs(gradient).max() > 1e-6, key
            assert (first[key] != last[key]).any(), key
    is_frozen = bool({FROZEN, FROZEN_BY_MODEL} & set(settings))
    assert bool(of_tower) == (not is_frozen)
    # Each item is encoded once in an encoder lane. A frozen tower has encoded the step that would
    # be next, too, unless it is divided.
    lane = next((int(each.split("=")[1]) for each in layout if "encoder.mp" in each), 1)
    is_ahead = is_frozen and lane == 1
    assert all(len(rank["encoded"]) == STEPS + is_ahead for rank in ranks)
    encoded = sum(sum(rank["encoded"][:STEPS]) for rank in ranks)
    assert encoded == lane * sum(wanted["items"])
    assert len(set(wanted["items"])) > 1 or PLANS in settings


@pytest.mark.parametrize(("size", "name"), [(s, name) for s in BROKEN for name in BROKEN[s]])
def test_a_broken_schedule_is_seen(run_file, references, size, name):
    case, breaks = BROKEN[size][name]
    ranks = steps_on_ranks(run_file, size, *SGD[size][case], breaks)
    assert errors_of(ranks, references(SGD[size][case][0]))["gradients"] > 1e-2


def test_dropout_draws_the_same_numbers_as_under_the_plain_schedule(run_file, references):
    settings = [*TWO, DROPOUT, PP2]
    plain = launch(sgd_steps, 2, arguments=(run_file, settings))
    found = launch(sgd_steps, 2, arguments=(run_file, [*settings, COLOCATED]))
    every = [
        {kind: {k: v for rank in ranks for k, v in rank[kind][-1].items()} for kind in _KINDS}
        for ranks in (plain, found)
    ]
    for kind in _KINDS:
        assert every[0][kind].keys() == every[1][kind].keys()
    wanted = {kind: [every[0][kind]] for kind in _KINDS} | {"norms": plain[0]["norms"]}
    last = [{kind: rank[kind][-1:] for kind in _KINDS} | {"norms": rank["norms"]} for rank in found]
    assert max(errors_of(last, wanted).values()) < TOLERANCE
    # One process draws other numbers, and without dropout there are others again.
    without = references(TWO)
    assert abs(without["norms"][0] / plain[0]["norms"][0] - 1.0) > 1e-3


_KINDS = ("gradients", "parameters")


def saved_in_parts(run_file: str, output_dir: str, overrides: list[str]) -> None:
    # A file for every rank, as of a large policy.
    writing.MIN_SHARD_BYTES = 1
    train_and_resume(run_file, output_dir, overrides)


class TestAdamW(EqualsOneDevice):
    # Of the five samples of evaluation one lane has none left while the other goes on.
    topologies: ClassVar = {
        "pp2": (2, [COLOCATED, PP2, STATE]),
        "divided tower": (2, [COLOCATED, PP2, encoder_mp(2)]),
        "pp2 dp2": (4, [COLOCATED, PP2, DP2, encoder_mp(4)]),
    }
    heavy: ClassVar = {
        "fan-in": (4, [COLOCATED, PP2, DP2]),
        "sequence parallelism": (4, [COLOCATED, PP2, *SP]),
        "sharding": (4, [COLOCATED, PP2, "parallel.sharding_degree=2", encoder_mp(2), STATE]),
    }

    @classmethod
    def launch(cls, num_ranks, run_file, output_dir, overrides):
        arguments = (str(run_file), str(output_dir), overrides)
        launch(saved_in_parts, num_ranks, arguments=arguments, timeout=300)

    def test_the_trained_policy_is_one_file(self, several, one_device):
        assert_one_file_of_weights(several / "final", one_device / "final")

    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        return [
            f"data.eval=[{run_file.with_name('few.jsonl')}]",
            *("train.save_steps=2", "train.eval_steps=2", "train.per_device_eval_batch_size=1"),
            *(*DAMPED, AGREES, *micro_batches(2, GLOBAL_BATCH // num_data_parts)),
        ]

    @pytest.mark.parametrize("name", ["pp2", "pp2 dp2"])
    def test_a_plain_run_continues_colocated(self, run_file, one_device, tmp_path, name):
        size, layout = self.topologies[name]
        settings = [*self.settings(run_file, num_data_parts(layout)), *layout]
        shutil.copytree(one_device / "checkpoint-2", tmp_path / "checkpoint-2")
        launch(train, size, arguments=(run_file, tmp_path, [*settings, RESUME]))
        wanted = arrays_of(one_device / "checkpoint-4")
        assert_close(arrays_of(tmp_path / "checkpoint-4"), wanted)
