"""The formula of memory per rank, and its table in docs/memory.md.

Guarantees: every stage shards what it should, computed by hand; gradients of several micro-batches
and the memory of each option are counted; the documented figures for pi07's published size come
from the formula.
"""

from dataclasses import replace
from pathlib import Path

import paddle
import pytest

from paddle_vl import PI07Config
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.prefix import LABELS
from paddle_vl.parallel.sharding import ShardingOptions
from tests.support.sharding_memory import (
    Elements,
    HeldBytes,
    ModelElements,
    at_peak,
    between_steps,
    passing_bytes,
)

DOCS = Path(__file__).parents[3] / "docs" / "memory.md"
# 1000 trained and 200 frozen parameters in units, 100 and 40 in the root.
HALF = ModelElements(Elements(1000, 200), Elements(100, 40), Elements(300, 0), 80, 2)
ONCE = ShardingOptions(reduce_once_per_step=True)
KEPT = ShardingOptions(reshard_after_forward=False)
SINGLE = ModelElements(Elements(1000, 200), Elements(100, 40), Elements(300, 0), 80, 4)


@pytest.mark.parametrize(
    ("model", "stage", "wanted"),
    [
        (HALF, 0, HeldBytes(2680, 4400, 0, 8800)),
        (HALF, 1, HeldBytes(2680, 1100, 4400, 2200)),
        (HALF, 2, HeldBytes(2680, 1100, 0, 2200)),
        (HALF, 3, HeldBytes(380, 1100, 0, 2200)),
        (SINGLE, 0, HeldBytes(5360, 0, 0, 8800)),
        (SINGLE, 1, HeldBytes(5360, 0, 4400, 2200)),
        (SINGLE, 3, HeldBytes(760, 1100, 0, 2200)),
    ],
)
def test_between_steps_every_stage_has_its_shards(model, stage, wanted):
    assert between_steps(model, stage, num_ranks=4) == wanted
    of_states = wanted.masters + wanted.gradients + wanted.moments
    assert wanted.total == wanted.parameters + of_states


@pytest.mark.parametrize(
    ("model", "stage", "once", "several"),
    [
        (HALF, 0, 4400, 6600),
        (HALF, 1, 4400, 4400),
        (HALF, 2, 1200, 1300),
        (HALF, 3, 1200, 1300),
        (SINGLE, 1, 4400, 4400),
        (SINGLE, 3, 1400, 1500),
    ],
)
def test_gradients_at_the_peak(model, stage, once, several):
    assert at_peak(model, stage, 4).gradients == once
    assert at_peak(model, stage, 4, num_micro_batches=3).gradients == several
    assert at_peak(model, stage, 4).moments == between_steps(model, stage, 4).moments


def test_reducing_once_keeps_full_float32_gradients():
    gradients = [at_peak(model, 2, 4, 3, ONCE).gradients for model in (HALF, SINGLE)]
    assert gradients == [4400, 4400]
    # One micro-batch accumulates nothing.
    assert at_peak(HALF, 2, 4, 1, ONCE) == at_peak(HALF, 2, 4)
    # The root's 2-byte gradients are unsharded, in addition to its sums, which may be larger.
    root = ModelElements(Elements(10), Elements(1000), Elements(10), 1000, 2)
    assert at_peak(root, 2, 4, 3, ONCE).gradients == 10 + 4000 + 2000


def test_kept_parameters_are_full_in_a_step_and_sharded_between_steps():
    assert between_steps(HALF, 3, 4).parameters == 380
    # All parameters at two bytes each, plus the shards of frozen ones.
    assert at_peak(HALF, 3, 4, 1, KEPT).parameters == 2 * 1340 + 100
    assert at_peak(HALF, 3, 4).parameters == 380


def test_stage_3_shards_the_table_and_a_separate_head():
    model = ModelElements(
        Elements(1000, 200), Elements(100, 40), Elements(300), 80, 2, Elements(30), Elements(50, 20)
    )
    # The root keeps 140 - 30 - 70; the 200 and 20 frozen ones are sharded.
    assert between_steps(model, 3, 4).parameters == 2 * 40 + 2 * 220 / 4
    assert between_steps(model, 2, 4) == between_steps(HALF, 2, 4)
    # The head's gradient is sharded, the table's is full.
    assert at_peak(model, 3, 4).gradients == 1050 + 2 * 50
    assert at_peak(model, 3, 4, 2).gradients == 1050 + 2 * 50 + 50
    assert at_peak(model, 2, 4).gradients == at_peak(HALF, 2, 4).gradients


def test_temporary_memory_of_units_and_tables():
    # Packed and unpacked gradients; at stage 3 gradients, those in flight, and parameters of two
    # units.
    assert [passing_bytes(HALF, stage) for stage in range(4)] == [0, 0, 2400, 3000]
    assert [passing_bytes(SINGLE, stage) for stage in (2, 3)] == [2400, 4800]
    sent_as_half = ShardingOptions(reduce_dtype="bfloat16")
    assert [passing_bytes(HALF, stage, sent_as_half) for stage in (2, 3)] == [1200, 2400]
    assert passing_bytes(HALF, 3, KEPT) == 2400
    # The float32 addend of the sum, in addition to the gradient.
    assert passing_bytes(HALF, 2, replace(ONCE, reduce_dtype="bfloat16")) == 1800
    table = ModelElements(HALF.units, Elements(5000), HALF.largest_unit, 5000, 2)
    assert passing_bytes(table, 2) == 20000
    assert passing_bytes(table, 2, sent_as_half) == 1200
    frozen = ModelElements(Elements(0, 900), HALF.root, Elements(0, 900), 80, 2)
    assert [passing_bytes(frozen, stage) for stage in (2, 3)] == [320, 3600]
    whole_table = ModelElements(HALF.units, HALF.root, Elements(1), 80, 2, table=Elements(0, 7000))
    assert passing_bytes(whole_table, 3) == 14000


def test_documented_figures_are_the_formulas():
    config = PI07Config.from_dict({"vlm_config": {"discrete_action_vocab_size": 2048}})
    with paddle.LazyGuard():
        pi07 = PI07LowLevelFlowMatching(config, {key: [1] for key in LABELS})
    units = [*pi07.vision_blocks, *pi07.decoder_layers]
    model = ModelElements.of(pi07.parameters(), units, 2, pi07.tables)
    text = DOCS.read_text(encoding="utf-8")
    assert f"{(model.units.total + model.root.total) / 1e9:.2f} billion" in text
    for stage, name in enumerate(("none", "1", "2", "3")):
        held, peak = between_steps(model, stage, 8), at_peak(model, stage, 8)
        passing = passing_bytes(model, stage)
        sizes = (held.parameters, held.masters, held.moments, held.total, peak.gradients, passing)
        cells = [f"{size / 2**30:.2f}" for size in (*sizes, peak.total + passing)]
        assert f"| {name} | {' | '.join(cells)} |" in text
