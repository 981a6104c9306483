"""Video frames: which to take, what time they show, and their patches. Decoding is not here.

Source: HF transformers' Qwen3-VL video processor and processor (the prompt form of 4.57).
Differs: frames are resized by PIL; HF's torchvision resize differs by one step of 8 bits.
"""

import numpy as np
from PIL import Image

from paddle_vl.data.vision.patches import patchify, value_table
from paddle_vl.data.vision.resize_rule import smart_resize_video


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
    wanted = int(total_num_frames / video_fps * target_fps)
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
    frames_RHWC: np.ndarray,
    *,
    min_pixels: int,
    max_pixels: int,
    patch_size: int,
    temporal_patch_size: int,
    merge_size: int,
    image_mean: tuple[float, ...],
    image_std: tuple[float, ...],
) -> dict[str, np.ndarray]:
    """Resize and cut the frames of one video.

    Args:
        frames_RHWC: uint8 RGB; an odd number is filled up by repeating the last frame.
        min_pixels, max_pixels: frames x height x width after resizing; pixels.

    Returns:
        pixel_values_videos `[P, 3 * temporal_patch_size * patch_size ** 2]` float32 and
        video_grid_thw `[1, 3]` int64.
    """
    height, width = smart_resize_video(
        *frames_RHWC.shape[:3],
        patch_size * merge_size,
        min_pixels,
        max_pixels,
        temporal_factor=temporal_patch_size,
    )
    resized = [
        np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC))
        for frame in frames_RHWC
    ]
    patches, grid = patchify(
        np.stack(resized),
        value_table(image_mean, image_std),
        patch_size=patch_size,
        temporal_patch_size=temporal_patch_size,
        merge_size=merge_size,
    )
    return {"pixel_values_videos": patches, "video_grid_thw": np.array([grid], dtype=np.int64)}
