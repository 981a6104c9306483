"""Qwen3-VL as a family: see `paddle_vl.families.base.Family`."""

from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration
from paddle_vl.families.vlm.recipe import VLRecipe


class Qwen3VLRecipe(VLRecipe):
    """A run that trains a Qwen3-VL."""

    model_class = Qwen3VLForConditionalGeneration
