"""The formula of memory per rank, and its table in docs/sharding.md.

Guarantees: every stage shards what it should, computed by hand; the documented figures for pi07's
published size come from the formula. `test_sharding_memory` compares it with real bytes.
"""

from pathlib import Path

import paddle
import pytest

from paddle_vl import PI07Config
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.prefix_layout import LABELS
from tests.support.sharding_memory import (
    Elements,
    HeldBytes,
    ModelElements,
    at_peak,
    between_steps,
    passing_bytes,
)

DOCS = Path(__file__).parents[3] / "docs" / "sharding.md"
# 1000 trained and 200 frozen parameters in units, 100 and 40 in the root.
HALF = ModelElements(Elements(1000, 200), Elements(100, 40), Elements(300, 0), 80, 2)
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
