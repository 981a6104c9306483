"""PaddleOCR-VL's image processor: short sides are enlarged first, whatever the limits say.

Patches are in merge-block order, as in all families here, where HF has rows of an image in order.

Source: the PIL backend of HF transformers' PaddleOCRVLImageProcessor, bit-exact with the same
Pillow: Pillow 13 resizes some images in another order of axes, which moves 8-bit values.
"""

from typing import Any

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.inputs.image_processor import ImageProcessor
from paddle_vl.files.stored_settings import checked

_SIZE = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}


@checked
class PaddleOCRVLImageProcessor(ImageProcessor):
    """Resizes and normalizes images and cuts them into patches; see `ImageProcessor`."""

    hf_class = ("image_processor_type", "PaddleOCRVLImageProcessor")
    family = ("PaddleOCR-VL", "PaddleOCRVLProcessor")

    @classmethod
    def from_dict(
        cls, config: dict[str, Any], name: str = "the settings"
    ) -> "PaddleOCRVLImageProcessor":
        """Build from HF's settings, in which `size` may have `min_pixels` and `max_pixels`; see
        `VisionProcessor.from_dict`."""
        size = config.get("size")
        if isinstance(size, dict):
            of_hub = {key: size[other] for key, other in _SIZE.items() if other in size}
            config = {**config, "size": of_hub | size}
        return super().from_dict(config, name)

    def to_dict(self) -> dict[str, Any]:
        """HF's settings as published for 1.0; PaddleX reads the limits at the top alone."""
        limits = {name: getattr(self, name) for name in _SIZE.values()}
        return {**super().to_dict(), "size": limits, **limits}

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if not self.do_resize:
            return height, width
        factor, new_height, new_width = self.patch_size * self.merge_size, height, width
        if new_height < factor:
            new_height, new_width = factor, round(new_width * factor / new_height)
        if new_width < factor:
            new_height, new_width = round(new_height * factor / new_width), factor
        try:
            return super()._resized(new_height, new_width)
        except BadSampleError as error:
            if (height, width) == (new_height, new_width):
                raise
            first = f"{width} x {height} pixels become at least {factor} on each side: "
            raise BadSampleError(error.kind, first + error.reason) from error
