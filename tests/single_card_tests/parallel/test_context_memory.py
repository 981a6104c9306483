"""The tables of docs/context_parallel.md are those of the formulas in `tests.support`, whose sizes
are those of the model."""

from pathlib import Path

import pytest

from paddle_vl import Qwen3VLConfig
from tests.support import context_memory as formulas

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
