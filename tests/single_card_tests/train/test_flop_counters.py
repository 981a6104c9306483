"""FLOPs of a run's batches, counted by its family.

Guarantees: for each family the counter equals the matrix products that the run computes, with
adapters, frozen components and zero-weight losses as set.
"""

import json
from pathlib import Path

import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.families.policy.model_inputs import PromptBatch, fields_present, planner_targets
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.nn.transfer import on_device
from paddle_vl.parallel.ranks import ONE_RANK
from paddle_vl.train.build import placed_model, run_family
from tests.single_card_tests.train.tiny_policy_run import PLANNER, write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.counted_products import counted_products

# Kernels whose products can be counted.
pytestmark = pytest.mark.usefixtures("uncompiled")

LORA = "model.lora={r: 2, target_modules: [q_proj, down_proj], modules_to_save: [mergers]}"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    """Settings of a run next to a base model."""
    path = write_tiny_run(tmp_path_factory.mktemp("run"))
    config = load_run_config(path)
    model = run_family(config).build_model(SingleDevicePlacement()).model
    model.materialize_all()
    model.save_pretrained(path.with_name("base"))
    return path


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory) -> Path:
    return write_tiny_policy_run(tmp_path_factory.mktemp("policy"), num_samples=4)


def prepared(path: Path, *overrides: str):
    """Family, built model, FLOP counter and a batch of one sample."""
    config = load_run_config(path, ["train.per_device_train_batch_size=1", *overrides])
    family = run_family(config)
    placed = placed_model(config, family, SingleDevicePlacement())
    built, model = placed.built, placed.built.model
    model.materialize_all()
    with family.train_loader(built.collator, ONE_RANK) as batches:
        batch = next(iter(batches))
    return family, built, family.flop_counter(model, placed.trained), batch


def counted(family, built, batch, monkeypatch) -> tuple[int, int]:
    with counted_products(monkeypatch) as counts:
        adapter = built.adapter
        output = adapter.forward(built.model, on_device(batch))
        family.loss.share(output, batch.counts, 1)[0].backward()
    return counts.forward, counts.forward + counts.backward


@pytest.mark.parametrize(
    "overrides",
    [["model.freeze=[vision]"], [LORA]],
    ids=["frozen tower", "adapters"],
)
def test_a_language_run_counts_what_it_runs(overrides, run_file, monkeypatch):
    base = ["model.config=null", f"model.pretrained={run_file.with_name('base')}"]
    family, built, counter, batch = prepared(run_file, *base, *overrides)
    expected = counted(family, built, batch, monkeypatch)
    assert (counter.forward(batch), counter(batch)) == expected


@pytest.mark.parametrize(
    "overrides",
    [["model.freeze=[vision, projector]"], ["train.loss_weighting={CE: 0.0}"]],
    ids=["frozen tower", "flow alone"],
)
def test_a_policy_run_counts_what_it_runs(overrides, policy_file, monkeypatch):
    settings = ["model.config.knowledge_insulation=false", *overrides]
    family, built, counter, batch = prepared(policy_file, *settings)
    batch = without_padding(batch)
    expected = counted(family, built, batch, monkeypatch)
    assert (counter.forward(batch), counter(batch)) == expected


def test_a_planners_run_counts_what_it_runs(policy_file, monkeypatch):
    settings = [f"model.config={json.dumps(PLANNER)}", "train.loss_weighting={CE_memory: 0.0}"]
    family, built, counter, batch = prepared(policy_file, *settings)
    batch = without_padding(batch)
    expected = counted(family, built, batch, monkeypatch)
    assert (counter.forward(batch), counter(batch)) == expected


def without_padding(batch: PromptBatch) -> PromptBatch:
    """Mark padding as real, because the model computes both."""
    for name, value in batch.items():
        if name.endswith("masks"):
            for mask in value if isinstance(value, list) else [value]:
                mask[:] = True
        if name == "obs_history_is_pad":
            value[:] = False
    made = planner_targets(batch) if "memory_masks" in batch else {}
    return batch | {"presence": fields_present(batch), **made}
