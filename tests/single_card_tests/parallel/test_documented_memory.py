"""Figures of docs/memory.md and docs/context_parallel.md, by the formulas in `tests.support`.

`tests/multi_card_tests/test_sharding_memory.py` measures what the first of them says.
"""

from pathlib import Path

import paddle
import pytest

from paddle_vl import PI07Config, Qwen3VLConfig
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.prefix import LABELS
from tests.support import context_memory as formulas
from tests.support.sharding_memory import (
    ModelElements,
    at_peak,
    between_steps,
    passing_bytes,
)

DOCS = Path(__file__).parents[3] / "docs" / "memory.md"


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


PAGE = Path(__file__).parents[3] / "docs" / "context_parallel.md"


@pytest.mark.parametrize("table", [formulas.documented_table, formulas.documented_traffic])
def test_the_page_has_the_table(table):
    assert table() in PAGE.read_text(encoding="utf-8"), table()


def test_sizes_are_those_of_the_model():
    config = Qwen3VLConfig.named("qwen3-vl-8b")
    text, vision = config.text_config, config.vision_config
    heads = text.num_attention_heads, text.num_key_value_heads
    assert tuple(n * text.head_dim for n in heads) == (formulas.QUERIES, formulas.KEYS)
    assert text.head_dim == formulas.HEAD
    found = (text.hidden_size, text.intermediate_size, text.num_hidden_layers, text.vocab_size)
    assert found == (formulas.WIDTH, formulas.INNER, formulas.LAYERS, formulas.VOCABULARY)
    found = (vision.hidden_size, vision.depth, vision.patch_dim)
    assert found == (formulas.TOWER_WIDTH, formulas.TOWER_LAYERS, formulas.PATCH)
    assert len(vision.deepstack_visual_indexes) == formulas.LEVELS
