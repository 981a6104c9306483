"""PaddleOCR-VL as a family: see `paddle_vl.families.base.Family`."""

from datetime import datetime
from pathlib import Path
from typing import cast

from paddle_vl.families.base import BuiltModel
from paddle_vl.families.paddleocr_vl.flops import PaddleOCRVLFlops
from paddle_vl.families.paddleocr_vl.inputs.processor import (
    PaddleOCRVLProcessor,
    answer_opening,
)
from paddle_vl.families.paddleocr_vl.model import PaddleOCRVLForConditionalGeneration
from paddle_vl.families.paddleocr_vl.settings import PARTS, PaddleOCRVLRun
from paddle_vl.families.vlm.recipe import VLRecipe
from paddle_vl.families.vlm.templates.rendering import ChatTemplateRenderer
from paddle_vl.families.vlm.templates.template_files import read_folder_templates
from paddle_vl.nn.placement import Placement


class PaddleOCRVLRecipe(VLRecipe):
    """A run that trains a PaddleOCR-VL."""

    model_class = PaddleOCRVLForConditionalGeneration
    counter_class = PaddleOCRVLFlops
    parts = PARTS

    def __init__(self, config: PaddleOCRVLRun, checkpoint: Path | None):
        super().__init__(config, checkpoint)
        own = config.model.pretrained
        if own is not None and config.data.processor is not None:
            _check_version(Path(own), cast(PaddleOCRVLProcessor, self.processor))

    def build_model(self, placement: Placement) -> BuiltModel:
        built = super().build_model(placement)
        built.model.save_layout = cast(PaddleOCRVLRun, self.config).model.save_layout
        return built


def _check_version(folder: Path, processor: PaddleOCRVLProcessor) -> None:
    """Check that a processor of another folder has the model's version.

    Raises:
        ValueError: the templates open an answer with different texts.
    """
    found = read_folder_templates(folder)
    if found is None:
        return
    own = answer_opening(ChatTemplateRenderer(found.source, datetime.now(), name=str(found.file)))
    if own != processor.opening:
        raise ValueError(
            f"data.processor is of another version than model.pretrained: its template opens an "
            f"answer with {processor.opening!r}, and {found.file} with {own!r}, with which the "
            "model was trained; leave data.processor out"
        )
