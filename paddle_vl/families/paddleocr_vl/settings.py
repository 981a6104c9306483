"""Settings of a run of PaddleOCR-VL, beyond those of every vision-language run."""

from typing import ClassVar, Literal

from paddle_vl.families.vlm.settings import VLModelConfig, VLRun

# As PARTS of `vlm.settings`, over the keys of the hub's files.
PARTS: dict[str, tuple[str, ...]] = {
    "vision": ("visual.*",),
    "mergers": ("mlp_AR.*",),
    "language": ("model.*", "lm_head.*"),
}


class PaddleOCRVLModelConfig(VLModelConfig):
    """The document model to train."""

    save_layout: Literal["hub", "transformers"] = "hub"
    """keys of model folders: those of the hub's files, with all that PaddleX and vLLM need, or
    those of transformers' modules; both are read"""


class PaddleOCRVLRun(VLRun):
    """All settings of a run of PaddleOCR-VL."""

    family: ClassVar[str] = "PaddleOCR-VL"
    parts: ClassVar[dict[str, tuple[str, ...]]] = PARTS

    model: PaddleOCRVLModelConfig
