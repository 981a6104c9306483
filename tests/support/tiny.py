"""The tiny Qwen3-VL of this package's own tests, with four heads, and the golden cases' place."""

from pathlib import Path

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.testing import tiny_qwen3_vl, tiny_qwen3_vl_config

GOLDEN = Path(__file__).parents[1] / "golden"
# For golden cases: see `tests.support.implementations`, and whether Paddle's own kernels may return
# views.
IMPLEMENTATIONS = [
    *(("cpu", True), ("cpu", False), ("compiled", True), ("plain", True)),
    *(("a100", True), ("h100", True)),
]
# Fewer heads than `tiny_qwen3_vl_config` has.
_HEADS = {"num_attention_heads": 4}


def tiny_config(**text_overrides) -> Qwen3VLConfig:
    """Three decoder layers of width 16, two deepstack levels, vocabulary of 64; with experts if
    `text_overrides` has them."""
    return tiny_qwen3_vl_config(**(_HEADS | text_overrides))


def tiny_model(seed: int = 0, **text_overrides) -> Qwen3VLForConditionalGeneration:
    """A model in which no parameter has a neutral value."""
    return tiny_qwen3_vl(seed=seed, **(_HEADS | text_overrides))
