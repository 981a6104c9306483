"""Reader of video files and of frames in memory: number of frames, frame rate, frames by number.

A file is decoded from its start, one frame at a time; only requested frames are converted. Frame i
shows the time i / fps, as in HF transformers, even if the frame rate varies.

Differs from HF's PyAV backend: frames are counted if the container does not state their number
(Matroska, WebM, MPEG-TS), frames hidden by an edit list are not counted, the file's display matrix
is applied, as for images, and cover pictures are no video streams.

Only the containers of `CONTAINERS` are opened. Playlists (HLS, DASH), scripts and patterns that
make FFmpeg open other files or the network are refused.
"""

import contextlib
import os
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import ImageSource, load_rgb, shown

if TYPE_CHECKING:
    import av
    import av.container

# HF's assumption for a video without a frame rate.
DEFAULT_FPS = 24.0
MIN_FRAMES = 2

# FFmpeg's names of the supported containers, which cannot refer to other files.
CONTAINERS = (
    "mov", "mp4", "3gp", "matroska", "webm", "avi", "mpeg", "mpegts", "mpegvideo", "m4v", "h264",
    "hevc", "ivf", "flv", "ogg", "gif", "asf", "mxf",
)  # fmt: skip
# 16384 x 8192; a larger frame is taken for an attack on memory.
_MOST_PIXELS = 1 << 27
# Sound formats are opened too, for the message that they have no picture.
_OPTIONS = {
    "protocol_whitelist": "file",
    "format_whitelist": ",".join((*CONTAINERS, "wav", "mp3", "flac")),
}

_MOV = "mov,mp4"
_REMEDY = "copy or download it again, or re-encode it"


@dataclass(frozen=True, eq=False)
class VideoFrames:
    """Frames in memory, sampled like a file.

    Attributes:
        pixels: uint8 RGB, `[frames, height, width, 3]`.
        fps: frames per second; None if unknown.
    """

    pixels: np.ndarray
    fps: float | None = None

    @property
    def num_frames(self) -> int:
        """Number of frames."""
        return len(self.pixels)

    def frames(self, indices: Iterable[int]) -> Generator[np.ndarray, None, None]:
        """Frames with these numbers, each uint8 RGB `[height, width, 3]`."""
        return (self.pixels[index] for index in indices)


@dataclass(frozen=True)
class FrameFiles:
    """A video that is given by the images of its frames, which are sampled already.

    Attributes:
        files: paths or bytes of images, or PIL images or arrays.
        fps: frames per second at which they were sampled; None for those of the processor.
    """

    files: tuple[ImageSource, ...]
    fps: float | None = None

    @property
    def num_frames(self) -> int:
        """Number of frames."""
        return len(self.files)

    def frames(self, indices: Iterable[int]) -> Generator[np.ndarray, None, None]:
        """Frames with these numbers, each uint8 RGB `[height, width, 3]`."""
        return (np.asarray(load_rgb(self.files[index])) for index in indices)


VideoSource = str | os.PathLike | VideoFrames | FrameFiles | np.ndarray


def open_video(source: VideoSource) -> "VideoFrames | FrameFiles | VideoFile":
    """A video with `num_frames`, `fps` and `frames(indices)`; no file stays open.

    Args:
        source: a path, `VideoFrames`, `FrameFiles`, or a uint8 array `[R, H, W, 3]` of unknown
            frame rate.

    Raises:
        BadSampleError: no such file, not a video, damaged, fewer than two frames (of `FrameFiles`
            one), or a frame rate that is not above zero. Some damage shows only when frames are
            decoded.
        RuntimeError: PyAV, which reads video files, is not installed.
    """
    if isinstance(source, np.ndarray):
        source = VideoFrames(source)
    if isinstance(source, VideoFrames):
        _check_array(source.pixels)
    is_open = isinstance(source, VideoFrames | FrameFiles)
    video = source if is_open else VideoFile(Path(source))
    fewest = 1 if isinstance(video, FrameFiles) else MIN_FRAMES
    if video.num_frames < fewest:
        raise BadSampleError(
            "too_few_frames",
            f"the video has {video.num_frames} frame(s); at least {fewest} are needed: use an "
            "image instead",
        )
    if video.fps is not None and not 0 < video.fps < np.inf:
        raise BadSampleError(
            "frame_rate",
            f"the video states {video.fps} frames per second; a number above 0 is needed: correct "
            "it, or re-encode the video",
        )
    return video


class VideoFile:
    """The first video stream of a file that is no cover picture.

    Attributes:
        num_frames: frames that the stream shows.
        fps: average frames per second; None if the file does not state it.
    """

    def __init__(self, path: Path):
        """Open the stream and read its header.

        Raises:
            BadSampleError: not a video, or no frame in it.
            RuntimeError: PyAV is not installed.
        """
        self._path = path
        with opened_container(path) as (container, stream):
            rate = stream.average_rate
            self.fps = None if rate is None else float(rate)
            self.num_frames = stream.frames
            if stream.frames and container.format.name.startswith(_MOV):
                # All stored frames; the index marks those that an edit list hides.
                self.num_frames = sum(not entry.is_discard for entry in stream.index_entries)
        if not self.num_frames:
            # Decoding is the only way that works for every codec.
            self.num_frames = sum(1 for _ in self._decode())
        if not self.num_frames:
            raise BadSampleError(
                "unreadable_video",
                f"no frame of the file can be decoded: it is cut off or damaged; {_REMEDY}",
            )

    def frames(self, indices: Sequence[int]) -> Generator[np.ndarray, None, None]:
        """Decode these frames, upright; one is in memory at a time.

        Args:
            indices: ascending frame numbers.

        Returns:
            uint8 RGB `[height, width, 3]` each.

        Raises:
            BadSampleError: the file is damaged or ends too early.
        """
        wanted = iter(indices)
        index = next(wanted, None)
        decoded = 0
        for number, frame in enumerate(self._decode()):
            decoded = number + 1
            while number == index:
                yield upright(frame)
                index = next(wanted, None)
            if index is None:
                return
        raise BadSampleError(
            "unreadable_video",
            f"the file states {self.num_frames} frames but only {decoded} can be decoded: it is "
            f"cut off or damaged; {_REMEDY}",
        )

    def _decode(self) -> "Iterator[av.VideoFrame]":
        """All frames. The file is opened anew, because seeking to the start is not exact."""
        with opened_container(self._path) as (container, stream):
            # Frame threading can lose the errors of the last frames.
            stream.thread_type = "SLICE"
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise BadSampleError(
                        "unreadable_video", f"the frame at {frame.time} s is damaged; {_REMEDY}"
                    )
                yield frame


def upright(frame: "av.VideoFrame", form: str = "rgb24") -> np.ndarray:
    """The picture of a frame, turned and mirrored by its display matrix to quarter turns, as by
    FFmpeg: `[height, width]`, with colours `[height, width, channels]`.

    Args:
        form: PyAV's name of the pixel format.
    """
    pixels = frame.to_ndarray(format=form)
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is not None:
        # The place (x, y) is shown at (a x + c y, b x + d y).
        a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5].tolist()
        if abs(b) > abs(a):
            pixels, a, d = pixels.swapaxes(0, 1), c, b
        pixels = pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
    return np.ascontiguousarray(pixels)


@contextlib.contextmanager
def opened_container(path: Path) -> "Iterator[tuple[av.container.InputContainer, av.VideoStream]]":
    """The file and its first video stream that is no cover picture; FFmpeg's errors become a
    BadSampleError."""
    if not os.path.isfile(path):
        raise BadSampleError("missing_video", f"there is no file {shown(str(path))}")
    with (
        decoding(path) as av,
        # "file:" prevents FFmpeg from parsing a protocol in the name; titles may be broken text.
        av.open(f"file:{path}", options=_OPTIONS, metadata_errors="replace") as container,
    ):
        cover = av.stream.Disposition.attached_pic
        films = [each for each in container.streams.video if not each.disposition & cover]
        if not films:
            # A file whose index is cut off shows streams of unknown kind as "data".
            others = {"cover picture" if s.type == "video" else s.type for s in container.streams}
            kinds = ", ".join(sorted(others - {"data"}))
            raise BadSampleError(
                "unreadable_video",
                f"the file has no video stream, only: {kinds}; use a file with a video"
                if kinds
                else f"the file cannot be decoded as a video (no picture in it); {_REMEDY}",
            )
        stream = films[0]
        _check_stream(stream)
        # Frames may be larger than the header states.
        stream.codec_context.options = {"max_pixels": str(_MOST_PIXELS)}
        yield container, stream


@contextlib.contextmanager
def decoding(path: Path) -> Iterator[Any]:
    """PyAV, whose errors become a BadSampleError.

    Raises:
        RuntimeError: PyAV is not installed.
    """
    # Imported here: PyAV is needed for video files only.
    try:
        import av
        from av.error import ArgumentError, FFmpegError
    except ImportError as error:
        raise RuntimeError(
            f"cannot read the video {path}: video files are read by PyAV, which is not installed; "
            "install it with: pip install 'av>=17' (the extra `video` of this package)"
        ) from error
    try:
        yield av
    except FFmpegError as error:
        # FFmpeg raises this for a format outside the whitelist.
        is_other = isinstance(error, ArgumentError)
        others = f", or convert it to one of {', '.join(CONTAINERS)}" if is_other else ""
        raise BadSampleError(
            "unreadable_video",
            f"the file cannot be decoded as a video ({error.strerror}); {_REMEDY}{others}",
        ) from error


def _check_stream(stream: "av.VideoStream") -> None:
    if stream.codec_context is None:
        raise BadSampleError(
            "unreadable_video",
            f"the file cannot be decoded as a video (unknown codec); {_REMEDY}",
        )
    if stream.width * stream.height > _MOST_PIXELS:
        size = f"{stream.width} x {stream.height}"
        raise BadSampleError(
            "unreadable_video",
            f"the file states frames of {size} pixels; at most {_MOST_PIXELS} pixels are decoded: "
            "it is damaged, or must be scaled down",
        )


def _check_array(frames_RHWC: Any) -> None:
    shape = np.shape(frames_RHWC)
    if (
        not isinstance(frames_RHWC, np.ndarray)
        or frames_RHWC.dtype != np.uint8
        or len(shape) != 4
        or shape[3] != 3
    ):
        raise BadSampleError(
            "unreadable_video",
            f"video frames have dtype {getattr(frames_RHWC, 'dtype', type(frames_RHWC).__name__)} "
            f"and shape {list(shape)}; a uint8 array [frames, height, width, 3] is needed",
        )


AnyVideo = VideoFrames | FrameFiles | VideoFile


def frame_rate(video: AnyVideo) -> float:
    """Frames per second of a video; HF's default of 24, with a warning, if it states none."""
    if video.fps is None:
        warnings.warn(
            f"a video states no frame rate; {DEFAULT_FPS:.0f} frames per second are assumed to "
            "choose frames and write timestamps",
            stacklevel=2,
        )
        return DEFAULT_FPS
    return video.fps
