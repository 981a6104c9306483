"""Settings of a run of PaddleOCR-VL, beyond those of every vision-language run."""

from typing import ClassVar

from paddle_vl.families.vlm.settings import VLRun

# As PARTS of `vlm.settings`, over the keys of the hub's files.
PARTS: dict[str, tuple[str, ...]] = {
    "vision": ("visual.*",),
    "mergers": ("mlp_AR.*",),
    "language": ("model.*", "lm_head.*"),
}


class PaddleOCRVLRun(VLRun):
    """All settings of a run of PaddleOCR-VL."""

    family: ClassVar[str] = "PaddleOCR-VL"
    parts: ClassVar[dict[str, tuple[str, ...]]] = PARTS
