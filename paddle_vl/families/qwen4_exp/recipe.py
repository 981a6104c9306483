"""Qwen4-Exp as a family: see `paddle_vl.families.base.Family`."""

from paddle_vl.families.qwen4_exp.flops import Qwen4ExpFlops
from paddle_vl.families.qwen4_exp.model import Qwen4ExpForConditionalGeneration
from paddle_vl.families.vlm.recipe import VLRecipe


class Qwen4ExpRecipe(VLRecipe):
    """A run that trains a Qwen4-Exp."""

    model_class = Qwen4ExpForConditionalGeneration
    counter_class = Qwen4ExpFlops
