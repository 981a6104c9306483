"""PaddleOCR-VL as a family: see `paddle_vl.families.base.Family`."""

from paddle_vl.families.paddleocr_vl.flops import PaddleOCRVLFlops
from paddle_vl.families.paddleocr_vl.model import PaddleOCRVLForConditionalGeneration
from paddle_vl.families.paddleocr_vl.settings import PARTS
from paddle_vl.families.vlm.recipe import VLRecipe


class PaddleOCRVLRecipe(VLRecipe):
    """A run that trains a PaddleOCR-VL."""

    model_class = PaddleOCRVLForConditionalGeneration
    counter_class = PaddleOCRVLFlops
    parts = PARTS
