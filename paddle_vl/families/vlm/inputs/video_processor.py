"""Video processor: frame sampling, timestamps, resizing, normalized patches and grids.

Source: HF transformers' Qwen3-VL video processor and processor. Of `FrameFiles` all frames are
taken, as by ms-swift 4.6 and LLaMA-Factory 0.9.5.
Differs: frames are resized by PIL; HF's torchvision resize differs by one 8-bit step.

Shapes: R frames, H and W pixels, P patches, n videos.
"""

import os
from collections.abc import Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from pydantic import Field

from paddle_vl.data.video_reader import (
    MIN_FRAMES,
    AnyVideo,
    FrameFiles,
    VideoSource,
    frame_rate,
    open_video,
)
from paddle_vl.families.vlm.inputs.image_processor import (
    ImageProcessor,
    encode_each,
    patchify,
    smart_resize,
)
from paddle_vl.families.vlm.inputs.preprocessor_files import VisionProcessor
from paddle_vl.files.stored_settings import Number, checked

# Limits of the published checkpoints, for a new processor.
_MIN_PIXELS, _MAX_PIXELS = 4096, 25165824
_Frames = Annotated[int, Field(ge=1, le=1 << 20)]
VideoMarkers = Literal["inner", "both"]


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
        fps: frames sampled per second of video, and those of `FrameFiles` that state none.
        min_frames, max_frames: bounds of the sampled frames; a shorter video gives all its frames.
        video_markers: whether a vision start and end enclose each temporal patch alone (`inner`),
            or also the video (`both`); None where nothing says it, for `inner`. HF has no such key.
    """

    # Defaults of HF's class; the published checkpoints do not state them.
    fps: Annotated[Number, Field(gt=0, le=1000)] = 2.0
    min_frames: _Frames = 4
    max_frames: _Frames = 768
    video_markers: VideoMarkers | None = None

    config_file = "video_preprocessor_config.json"
    section = "video_processor"
    hf_class = ("video_processor_type", "Qwen3VLVideoProcessor")
    always_on = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_sample_frames")
    never_on = ("num_frames", "cap_pixels_per_frame")
    own = ("fps", "min_frames", "max_frames", "video_markers")
    bounds = (*VisionProcessor.bounds, ("min_frames", "max_frames", MIN_FRAMES))
    kind = "video"

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike, images: ImageProcessor, **replaced: Any
    ) -> "VideoProcessor":
        """Read `processor_config.json` or `video_preprocessor_config.json` of a checkpoint, or, as
        transformers without these, the settings of images: an image's area is then that of all
        frames.

        Args:
            images: the checkpoint's image processor; `like_images` where no file has settings.
            replaced: fps, min_frames, max_frames, min_pixels, max_pixels or video_markers; None
                keeps the file's.

        Raises:
            RuntimeError: the file is not JSON.
            ValueError: a setting is missing, out of range or not supported.
        """
        found, plain = cls.find(directory), Path(directory) / images.config_file
        if found is None and plain.is_file():
            *_, of_images = ImageProcessor.stored_in(plain.parent)
            limits = {"min_pixels": of_images.min_pixels, "max_pixels": of_images.max_pixels}
            found = cls.like_images(of_images).replaced(**limits)
        return (found or cls.like_images(images)).replaced(**replaced)

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

    def __call__(self, videos: Sequence[VideoSource], with_pixels: bool = True) -> ProcessedVideos:
        """Patches and timestamps of all videos, in order.

        Args:
            videos: paths, `VideoFrames`, `FrameFiles`, or uint8 `[R, H, W, 3]` arrays; at least
                one.
            with_pixels: False gives zeros `[P, 1]`, with grids and timestamps from headers and
                first frames.

        Raises:
            BadSampleError: a video cannot be read or resized, with its number.
            RuntimeError: a file is given and PyAV is not installed.
        """
        pixels, grid, timestamps = encode_each(self, videos, with_pixels)
        return ProcessedVideos({"pixel_values_videos": pixels, "video_grid_thw": grid}, timestamps)

    def tokens_per_patch(self, video_grid_thw: np.ndarray) -> np.ndarray:
        """Visual tokens per temporal patch of every video of a `[n, 3]` grid: `[n]` int64."""
        return video_grid_thw[:, 1:].prod(axis=1) // self.merge_size**2

    def encode_one(self, source: VideoSource, with_pixels: bool) -> tuple[Any, ...]:
        video, indices, times = self._chosen(source)
        with closing(video.frames(indices.tolist() if with_pixels else [0])) as frames:
            first = next(frames)
            height, width = smart_resize(
                first.shape[0],
                first.shape[1],
                self.patch_size * self.merge_size,
                self.min_pixels,
                self.max_pixels,
                len(indices),
                self.temporal_patch_size,
            )
            if not with_pixels:
                return *self.without_pixels(len(times), height, width), times
            resized_RHWC = np.empty((len(indices), height, width, 3), dtype=np.uint8)
            for number, frame in enumerate(chain([first], frames)):
                image = Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)
                resized_RHWC[number] = np.asarray(image)
        return *patchify(resized_RHWC, self), times

    def _chosen(self, source: VideoSource) -> tuple[AnyVideo, np.ndarray, list[float]]:
        """A video, the numbers of its sampled frames, and the timestamps of its patches."""
        video = open_video(source)
        if isinstance(video, FrameFiles):
            fps, last = video.fps or self.fps, video.num_frames - 1
            # The last one fills its patch before the size is chosen.
            whole = -(-video.num_frames // self.temporal_patch_size) * self.temporal_patch_size
            indices = np.minimum(np.arange(whole), last)
        else:
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
