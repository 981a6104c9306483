"""PaddleOCR-VL as a family: see `paddle_vl.families.base.Family`."""

from typing import cast

from paddle_vl.families.base import BuiltModel
from paddle_vl.families.paddleocr_vl.flops import PaddleOCRVLFlops
from paddle_vl.families.paddleocr_vl.model import PaddleOCRVLForConditionalGeneration
from paddle_vl.families.paddleocr_vl.settings import PARTS, PaddleOCRVLRun
from paddle_vl.families.vlm.recipe import VLRecipe
from paddle_vl.nn.placement import Placement


class PaddleOCRVLRecipe(VLRecipe):
    """A run that trains a PaddleOCR-VL."""

    model_class = PaddleOCRVLForConditionalGeneration
    counter_class = PaddleOCRVLFlops
    parts = PARTS

    def build_model(self, placement: Placement) -> BuiltModel:
        built = super().build_model(placement)
        built.model.save_layout = cast(PaddleOCRVLRun, self.config).model.save_layout
        return built
