"""Video processor: frame sampling, timestamps, resizing, normalized patches and grids.

Source: HF transformers' Qwen3-VL video processor and processor (the prompt form of 4.57).
Differs: frames are resized by PIL; HF's torchvision resize differs by one 8-bit step.

Shapes: R frames, H and W pixels, P patches, n videos.
"""

import os
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, Any, NamedTuple

import numpy as np
from PIL import Image
from pydantic import Field

from paddle_vl.data.video_reader import (
    MIN_FRAMES,
    AnyVideo,
    VideoSource,
    frame_rate,
    open_video,
)
from paddle_vl.families.vlm.inputs.image_processor import (
    ImageProcessor,
    of_each,
    patchify,
    smart_resize_video,
)
from paddle_vl.families.vlm.inputs.preprocessor_files import VisionProcessor
from paddle_vl.files.checked_values import Number, checked

# Limits of the published checkpoints, for a folder with settings of images only.
_MIN_PIXELS, _MAX_PIXELS = 4096, 25165824
_Frames = Annotated[int, Field(ge=1, le=1 << 20)]


class ProcessedVideos(NamedTuple):
    """All videos of a sample, in order.

    Attributes:
        arrays: pixel_values_videos `[P, 3 * temporal_patch_size * patch_size ** 2]` float32 and
            video_grid_thw `[n, 3]` int64, patches (t, h, w).
        timestamps: per video, the time of each temporal patch; seconds.
    """

    arrays: dict[str, np.ndarray]
    timestamps: list[list[float]]


@checked
class VideoProcessor(VisionProcessor):
    """Samples, resizes and normalizes frames and cuts them into patches.

    Attributes:
        fps: frames sampled per second of video.
        min_frames, max_frames: bounds of the sampled frames; a shorter video gives all its frames.
    """

    # Defaults of HF's class; the published checkpoints do not state them.
    fps: Annotated[Number, Field(gt=0, le=1000)] = 2.0
    min_frames: _Frames = 4
    max_frames: _Frames = 768

    config_file = "video_preprocessor_config.json"
    section = "video_processor"
    hf_class = ("video_processor_type", "Qwen3VLVideoProcessor")
    always_on = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_sample_frames")
    own = ("fps", "min_frames", "max_frames")

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high, least in (
            ("min_pixels", "max_pixels", 1),
            ("min_frames", "max_frames", MIN_FRAMES),
        ):
            values = getattr(self, low), getattr(self, high)
            if not least <= values[0] <= values[1]:
                raise ValueError(
                    f"video {low} {values[0]} and {high} {values[1]}: {least} <= {low} <= {high} "
                    f"is needed; set data.video_{low} and data.video_{high} together, or correct "
                    f"{self.config_file}"
                )

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike, images: ImageProcessor, **replaced: float | None
    ) -> "VideoProcessor":
        """Read `video_preprocessor_config.json` (or `processor_config.json`) of a checkpoint.

        Args:
            images: the checkpoint's image processor; without a file for videos, `like_images`.
            replaced: fps, min_frames, max_frames, min_pixels or max_pixels; None keeps the file's.

        Raises:
            RuntimeError: the file is not JSON.
            ValueError: a setting is missing, out of range or not supported.
        """
        return (cls.find(directory) or cls.like_images(images)).replaced(**replaced)

    @classmethod
    def like_images(cls, images: ImageProcessor) -> "VideoProcessor":
        """Patch sizes of an image processor, pixel limits of the published checkpoints."""
        return cls(
            min_pixels=_MIN_PIXELS,
            max_pixels=_MAX_PIXELS,
            patch_size=images.patch_size,
            temporal_patch_size=images.temporal_patch_size,
            merge_size=images.merge_size,
            image_mean=images.image_mean,
            image_std=images.image_std,
        )

    @classmethod
    def from_dict(cls, config: dict[str, Any], name: str = "the settings") -> "VideoProcessor":
        """Build from HF's settings.

        Raises:
            ValueError: settings are missing, out of range or not supported; all are named.
        """
        if config.get("num_frames") is not None or config.get("cap_pixels_per_frame"):
            raise ValueError(
                f"{name} has num_frames {config.get('num_frames')} and cap_pixels_per_frame "
                f"{config.get('cap_pixels_per_frame')}, which are not supported: remove them and "
                "limit videos by fps, max_frames and size.longest_edge"
            )
        return super().from_dict(config, name)

    def to_dict(self) -> dict[str, Any]:
        """HF's settings, in the dialect of the published Qwen3-VL checkpoints."""
        return super().to_dict() | {key: getattr(self, key) for key in self.own}

    def __call__(self, videos: Sequence[VideoSource]) -> ProcessedVideos:
        """Patches and timestamps of all videos, in order.

        Args:
            videos: paths, `VideoFrames`, or uint8 `[R, H, W, 3]` arrays; at least one.

        Raises:
            BadSampleError: a video cannot be read or resized, with its number.
            RuntimeError: a file is given and PyAV is not installed.
        """
        if not videos:
            raise ValueError("no video given: a sample without videos has no pixel_values_videos")
        patches, grids, timestamps = zip(*of_each("video", self._process, videos), strict=True)
        arrays = {
            "pixel_values_videos": patches[0] if len(patches) == 1 else np.concatenate(patches),
            "video_grid_thw": np.array(grids, np.int64),
        }
        return ProcessedVideos(arrays, list(timestamps))

    def grids(self, videos: Sequence[VideoSource]) -> tuple[np.ndarray, list[list[float]]]:
        """Grids `[n, 3]` int64 and timestamps of videos, from headers and first frames.

        Raises:
            BadSampleError, RuntimeError: as `__call__`, as far as these show it.
        """
        grids, timestamps = zip(*of_each("video", self._outline, videos), strict=True)
        return np.array(grids, np.int64), list(timestamps)

    def tokens_per_patch(self, video_grid_thw: np.ndarray) -> np.ndarray:
        """Visual tokens per temporal patch of every video of a `[n, 3]` grid: `[n]` int64."""
        return video_grid_thw[:, 1:].prod(axis=1) // self.merge_size**2

    def _outline(self, source: VideoSource) -> tuple[tuple[int, ...], list[float]]:
        video, indices, times = self._chosen(source)
        with closing(video.frames([0])) as frames:
            height, width = next(frames).shape[:2]
        sides = self._resized(len(indices), height, width)
        return (len(times), *(side // self.patch_size for side in sides)), times

    def _process(self, source: VideoSource) -> tuple[np.ndarray, tuple[int, int, int], list[float]]:
        video, indices, times = self._chosen(source)
        resized_RHWC: Any = None
        for number, frame in enumerate(video.frames(indices.tolist())):
            if resized_RHWC is None:
                height, width = self._resized(len(indices), *frame.shape[:2])
                resized_RHWC = np.empty((len(indices), height, width, 3), dtype=np.uint8)
            _, height, width, _ = resized_RHWC.shape
            image = Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)
            resized_RHWC[number] = np.asarray(image)
        return *patchify(resized_RHWC, self), times

    def _resized(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        factor, budget = self.patch_size * self.merge_size, (self.min_pixels, self.max_pixels)
        of_time = self.temporal_patch_size
        return smart_resize_video(num_frames, height, width, factor, *budget, of_time)

    def _chosen(self, source: VideoSource) -> tuple[AnyVideo, np.ndarray, list[float]]:
        """A video, the numbers of its sampled frames, and the timestamps of its patches."""
        video = open_video(source)
        fps = frame_rate(video)
        indices = sample_frame_indices(
            video.num_frames,
            fps,
            target_fps=self.fps,
            min_frames=self.min_frames,
            max_frames=self.max_frames,
        )
        return video, indices, patch_timestamps(indices, fps, self.temporal_patch_size)


def sample_frame_indices(
    total_num_frames: int,
    video_fps: float,
    *,
    target_fps: float = 2,
    min_frames: int = 4,
    max_frames: int = 768,
) -> np.ndarray:
    """Numbers of the sampled frames, evenly spaced from the first to the last: `[R]` int64.

    R is the duration in seconds times `target_fps`, within `[min_frames, max_frames]` and at most
    `total_num_frames`. Example: 100 frames at 25 fps -> 0 14 28 42 57 71 85 99.
    """
    wanted = int(min(total_num_frames / video_fps * target_fps, max_frames))
    wanted = min(max(wanted, min_frames), max_frames, total_num_frames)
    return np.linspace(0, total_num_frames - 1, wanted).round().astype(np.int64)


def patch_timestamps(
    frame_indices: np.ndarray, video_fps: float, temporal_patch_size: int = 2
) -> list[float]:
    """Time of every temporal patch in seconds: the mean of its first and last frame."""
    indices = list(frame_indices)
    indices += indices[-1:] * (-len(indices) % temporal_patch_size)
    times = [index / video_fps for index in indices]
    last = temporal_patch_size - 1
    return [
        float((times[i] + times[i + last]) / 2) for i in range(0, len(times), temporal_patch_size)
    ]


def timestamp_text(seconds: float) -> str:
    """The timestamp in front of a temporal patch: `<1.4 seconds>`."""
    return f"<{seconds:.1f} seconds>"
