"""Qwen3.5 as a family: see `paddle_vl.families.base.Family`."""

from paddle_vl.families.qwen3_5.model import Qwen3_5ForConditionalGeneration
from paddle_vl.families.vlm.modeling.delta_flops import DeltaFlops
from paddle_vl.families.vlm.recipe import VLRecipe


class Qwen3_5Recipe(VLRecipe):
    """A run that trains a Qwen3.5, dense or with experts."""

    model_class = Qwen3_5ForConditionalGeneration
    counter_class = DeltaFlops
