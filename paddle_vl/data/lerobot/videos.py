"""Frames of video files by their times. Files stay open, a few at a time.

A frame is decoded from the key frame before it, or from the last decoded one if that is near.
"""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.lerobot.tables import FileVersion, version_of
from paddle_vl.data.video_reader import decoding, opened_container, upright

# Decoders hold reference frames, some ten megabytes each.
_MOST_OPEN = 16
# So many frames are decoded rather than sought over.
_NEAR_FRAMES = 8
# Where a key frame's place in the file misled the search, it goes on from here, in seconds before.
_BACK_S = 2.0
# A frame so near to the wanted time is the nearest.
_SAME_S = 1e-4


class SeekableVideo:
    """One file, which stays open until `close`."""

    def __init__(self, path: Path):
        """
        Raises:
            BadSampleError: there is no such file, or it is damaged.
        """
        self._path, self._stack = path, ExitStack()
        self._container, self._stream = self._stack.enter_context(opened_container(path))
        # Frame threading can lose errors, and delays single frames; workers use the other cores.
        self._stream.thread_type = "SLICE"
        self._stream.codec_context.thread_count = 1
        self._unit = float(self._stream.time_base or 0)
        self._first = (self._stream.start_time or 0) * self._unit
        self._period = 1 / float(self._stream.average_rate or 1)
        self._decoded: Any = None
        self._last: Any = None

    def close(self) -> None:
        self._decoded = self._last = None
        self._stack.close()

    def frames(self, times: Sequence[float], tolerance_s: float, form: str) -> list[np.ndarray]:
        """The frames nearest to these times, in their order, upright.

        Args:
            times: seconds since the first frame, float32 or sums of such.
            tolerance_s: most seconds by which a frame may miss its time, but for rounding.
            form: PyAV's name of the pixel format.

        Raises:
            BadSampleError: no frame is there, or the file is damaged.
        """
        found = {}
        with decoding(self._path):
            for time in sorted({*times}):
                found[time] = upright(self._frame(time, tolerance_s), form)
        return [found[time] for time in times]

    def _frame(self, time: float, tolerance_s: float) -> Any:
        last = None if self._last is None else self._time(self._last)
        rounding = min(float(np.spacing(np.float32(time))), self._period) / 2
        same = min(tolerance_s, _SAME_S) + rounding
        if last is None or not last - same <= time <= last + _NEAR_FRAMES * self._period:
            self._seek(time, same)
        candidates = [self._last]
        while self._last is not None and self._time(self._last) < time - same:
            self._next()
            candidates = [candidates[-1], self._last]
        there = [frame for frame in candidates if frame is not None]
        nearest = min(there, key=lambda frame: abs(self._time(frame) - time), default=None)
        miss = float("inf") if nearest is None else abs(self._time(nearest) - time)
        if nearest is None or miss > tolerance_s + rounding:
            at = "none at all" if nearest is None else f"the nearest is at {self._time(nearest):g}"
            # Beyond half a frame it would be another moment's.
            is_small = miss < self._period / 2
            small = f", or set tolerance_s above the {miss:.2g} s that are missed"
            raise BadSampleError(
                "frame_time",
                f"the video has no frame at {time:g} s (within {tolerance_s:g} s; {at}): it does "
                "not fit the dataset's timestamps, or is cut off; fetch it again, or leave the "
                "episode out (excluded_episodes)" + (small if is_small else ""),
            )
        return nearest

    def _seek(self, time: float, same: float) -> None:
        """Decode a frame at or before a time."""
        target = time
        while True:
            offset = round((max(target, 0.0) + self._first) / self._unit)
            self._container.seek(offset, stream=self._stream)
            self._decoded = self._container.decode(self._stream)
            self._next()
            # Files are searched by decoding times, which lie before those of display.
            if target <= 0 or (self._last and self._time(self._last) <= time + same):
                return
            target -= _BACK_S

    def _next(self) -> None:
        self._last = next(self._decoded, None)
        if self._last is not None and self._last.is_corrupt:
            raise BadSampleError(
                "unreadable_video",
                f"the frame at {self._time(self._last):g} s is damaged; copy or download the file "
                "again",
            )

    def _time(self, frame: Any) -> float:
        return frame.pts * self._unit - self._first


# Of all datasets of this process, those used last at the end.
_open: OrderedDict[FileVersion, SeekableVideo] = OrderedDict()


def read_frames(
    path: Path, times: Sequence[float], tolerance_s: float, form: str = "rgb24"
) -> list[np.ndarray]:
    """See `SeekableVideo.frames`; errors name the file."""
    version = version_of(path)
    try:
        if version not in _open:
            _open[version] = SeekableVideo(path)
            if len(_open) > _MOST_OPEN:
                _open.popitem(last=False)[1].close()
        _open.move_to_end(version)
        return _open[version].frames(times, tolerance_s, form)
    except BadSampleError as error:
        # The decoder's state is unknown.
        if version in _open:
            _open.pop(version).close()
        raise BadSampleError(error.kind, f"{path}: {error.reason}") from error
