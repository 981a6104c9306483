"""Video frames: which to take, what time they show, and their patches.

Source: HF transformers' Qwen3-VL video processor and processor (the prompt form of 4.57).
Differs: frames are resized by PIL; HF's torchvision resize differs by one step of 8 bits.
"""

from collections.abc import Iterable

import numpy as np
from PIL import Image

from paddle_vl.families.qwen3_vl.inputs.patches import patchify, value_table
from paddle_vl.families.qwen3_vl.inputs.resize_rule import smart_resize_video


def sample_frame_indices(
    total_num_frames: int,
    video_fps: float,
    *,
    target_fps: float = 2,
    min_frames: int = 4,
    max_frames: int = 768,
) -> np.ndarray:
    """Frames to take, evenly spread from the first to the last: `[R]` int64.

    R is the length in seconds times `target_fps`, kept within `[min_frames, max_frames]` and never
    above `total_num_frames`. 100 frames at 25 fps -> 0 14 28 42 57 71 85 99.
    """
    wanted = int(min(total_num_frames / video_fps * target_fps, max_frames))
    wanted = min(max(wanted, min_frames), max_frames, total_num_frames)
    return np.linspace(0, total_num_frames - 1, wanted).round().astype(np.int64)


def patch_timestamps(
    frame_indices: np.ndarray, video_fps: float, temporal_patch_size: int = 2
) -> list[float]:
    """Seconds shown by every temporal patch: the mean of its first and its last frame."""
    indices = list(frame_indices)
    indices += indices[-1:] * (-len(indices) % temporal_patch_size)
    times = [index / video_fps for index in indices]
    last = temporal_patch_size - 1
    return [
        float((times[i] + times[i + last]) / 2) for i in range(0, len(times), temporal_patch_size)
    ]


def timestamp_text(seconds: float) -> str:
    """The text in front of a temporal patch: `<1.4 seconds>`."""
    return f"<{seconds:.1f} seconds>"


def process_frames(
    frames: Iterable[np.ndarray],
    num_frames: int,
    *,
    min_pixels: int,
    max_pixels: int,
    patch_size: int,
    temporal_patch_size: int,
    merge_size: int,
    image_mean: tuple[float, ...],
    image_std: tuple[float, ...],
) -> dict[str, np.ndarray]:
    """Resize and cut the frames of one video. They are resized as they come, and not kept before.

    Args:
        frames: uint8 RGB `[H, W, 3]` each; an odd number is filled up by repeating the last frame.
        num_frames: how many come.
        min_pixels, max_pixels: frames x height x width after resizing; pixels.

    Returns:
        pixel_values_videos `[P, 3 * temporal_patch_size * patch_size ** 2]` float32 and
        video_grid_thw `[1, 3]` int64.

    Raises:
        BadSampleError: fewer frames than fill a temporal patch, or too long and thin ones.
    """
    resized_RHWC = None
    for number, frame in enumerate(frames):
        if resized_RHWC is None:
            height, width = smart_resize_video(
                num_frames,
                *frame.shape[:2],
                patch_size * merge_size,
                min_pixels,
                max_pixels,
                temporal_factor=temporal_patch_size,
            )
            resized_RHWC = np.empty((num_frames, height, width, 3), dtype=np.uint8)
        image = Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)
        resized_RHWC[number] = np.asarray(image)
    patches, grid = patchify(
        resized_RHWC,
        value_table(image_mean, image_std),
        patch_size=patch_size,
        temporal_patch_size=temporal_patch_size,
        merge_size=merge_size,
    )
    return {"pixel_values_videos": patches, "video_grid_thw": np.array([grid], dtype=np.int64)}
