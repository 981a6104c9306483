"""The processor case: resize rules, bit-exact pixels, frame sampling and timestamps."""

from collections.abc import Iterator

from paddle_vl.data.video_reader import VideoFrames
from paddle_vl.families.vlm.inputs.image_processor import (
    ImageProcessor,
    smart_resize,
)
from paddle_vl.families.vlm.inputs.video_processor import (
    VideoProcessor,
    patch_timestamps,
    sample_frame_indices,
)
from paddle_vl.families.vlm.templates.encoding import timestamp_text
from parity.comparison import CaseReport
from parity.golden import QwenCase

# The case's video was resized by torchvision; PIL differs by up to one 8-bit step.
ONE_PIXEL_STEP = 2 / 255 + 1e-6


def compare_processor(case: QwenCase, scale: float) -> Iterator[CaseReport]:
    """One report for images and one for videos."""
    tables, tensors = case.meta, case.tensors
    images = CaseReport(f"{case.name}/images", scale, tensors)
    for *arguments, wanted in tables["image_smart_resize"]["rows"]:
        images.exact("resize", str(arguments), *_outcome(smart_resize, arguments, wanted))
    settings = tables["image"]["config"]
    pictures = [tensors[f"image.{i}.rgb_uint8"] for i in range(len(tables["image"]["grid"]))]
    found = ImageProcessor.from_dict(settings)(pictures)
    images.exact("grids", "image.image_grid_thw", found["image_grid_thw"])
    images.exact("pixels", "image.pil.pixel_values", found["pixel_values"])
    found = ImageProcessor.from_dict(settings | {"do_resize": False})(pictures[2:3])
    images.exact("grids", "image.noresize.image_grid_thw", found["image_grid_thw"])
    images.exact("pixels", "image.noresize.pixel_values", found["pixel_values"])
    yield images

    videos = CaseReport(f"{case.name}/videos", scale, tensors)
    table = tables["video_smart_resize"]
    for *arguments, wanted in table["rows"]:
        frames, height, width, low, high = arguments
        limits = (table["factor"], low, high)
        arguments = [height, width, *limits, frames, table["temporal_factor"]]
        videos.exact("resize", str(arguments), *_outcome(smart_resize, arguments, wanted))
    processor = VideoProcessor.from_dict(settings | {"size": tables["video"]["size"]})
    # The frames have 2 fps and 2 fps are sampled: every frame is taken.
    found = processor([VideoFrames(tensors["video.rgb_uint8"], 2.0)]).arrays
    videos.exact("grids", "video.video_grid_thw", found["video_grid_thw"])
    pixels = found["pixel_values_videos"]
    videos.absolute("pixels", "video.pixel_values_videos", pixels, ONE_PIXEL_STEP)
    for row in tables["frame_sampling"]:
        limits = {name: row[name] for name in ("target_fps", "min_frames", "max_frames")}
        indices = sample_frame_indices(row["total_num_frames"], row["fps"], **limits)
        times = patch_timestamps(indices, row["fps"])
        name = f"{row['total_num_frames']} frames at {row['fps']} fps"
        videos.exact("frames", name, indices, row["indices"])
        videos.absolute("times", name, times, 1e-6, row["timestamps"])
        videos.exact("times", f"{name}, text", [timestamp_text(t) for t in times], row["text"])
    yield videos


def _outcome(function, arguments: list, wanted) -> tuple[list, list]:
    """The result of a call and the expected one; a ValueError counts as a result."""
    try:
        return list(function(*arguments)), wanted if isinstance(wanted, list) else [wanted]
    except ValueError:
        return ["ValueError"], wanted if isinstance(wanted, list) else [wanted]
