"""FLOPs of a run's batches, counted by its family, are the matrix products that it computes."""

import json
from functools import partial
from pathlib import Path

import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.families.policy.model_inputs import PromptBatch, fields_present, planner_targets
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.nn.transfer import on_device
from paddle_vl.parallel.ranks import ONE_RANK
from paddle_vl.train.build import placed_model, run_family
from tests.single_card_tests.train.run_kinds import write_lora_run
from tests.single_card_tests.train.tiny_policy_run import PLANNER, write_tiny_policy_run
from tests.support.counted_products import counted_products

# Kernels whose products can be counted.
pytestmark = pytest.mark.usefixtures("uncompiled")


write_small_policy = partial(write_tiny_policy_run, num_samples=4)


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


SHARED = "model.config.knowledge_insulation=false"
RUNS = {
    "frozen tower": (write_lora_run, ["model.lora=null", "model.freeze=[vision]"]),
    "adapters": (write_lora_run, []),
    "policy, frozen tower": (write_small_policy, [SHARED, "model.freeze=[vision, projector]"]),
    "policy, flow alone": (write_small_policy, [SHARED, "train.loss_weighting={CE: 0.0}"]),
    "planner": (
        write_small_policy,
        [f"model.config={json.dumps(PLANNER)}", "train.loss_weighting={CE_memory: 0.0}"],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_counts_what_it_computes(name, tmp_path, monkeypatch):
    write, settings = RUNS[name]
    family, built, counter, batch = prepared(write(tmp_path), *settings)
    if write is write_small_policy:
        batch = without_padding(batch)
    with counted_products(monkeypatch) as counts:
        adapter = built.adapter
        output = adapter.forward(built.model, on_device(batch))
        family.loss.share(output, batch.counts, 1)[0].backward()
    assert counter.forward(batch) == counts.forward
    assert counter(batch) == counts.forward + counts.backward
