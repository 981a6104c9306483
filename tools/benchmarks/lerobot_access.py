"""Random access to a long video: the reader of LeRobot datasets, lerobot's own, and PyAV alone.

    python tools/benchmarks/lerobot_access.py
    python tools/benchmarks/lerobot_access.py --against /path/to/python-with-lerobot

Makes a ten-minute video with the key frames of lerobot (every second frame) and one with those of
FFmpeg's default (every 250th), and reads frames at random times, each with one core. Without
--against the other side decodes from the start of the file up to the frame.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from harness import Result, Table, add_count, parser, run, spread
from paddle_vl.data.lerobot.videos import read_frames
from paddle_vl.data.video_reader import VideoFile

FPS, SIZE = 20, (240, 320)
GROUPS = {"every 2nd": 2, "every 250th": 250}
# From the start a frame takes seconds.
MOST_FROM_START = 5
# Run by the other interpreter: reads the same frames, prints the milliseconds of each as JSON.
LEROBOT = """
import json, sys, time
from lerobot.datasets.video_utils import decode_video_frames
file, *times = sys.argv[1:]
found = []
for moment in map(float, times):
    begin = time.perf_counter()
    decode_video_frames(file, [moment], 1e-4)
    found.append(1000 * (time.perf_counter() - begin))
print(json.dumps(found))
"""


def write_video(file: Path, seconds: int, group: int) -> None:
    """A view that moves over smooth noise, in H.264 at 20 frames per second."""
    import av

    height, width = SIZE
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (height // 16, width // 16 + 64, 3), dtype=np.uint8)
    still = coarse.repeat(16, axis=0).repeat(16, axis=1)
    with av.open(str(file), "w") as container:
        options = {"g": str(group), "preset": "veryfast"}
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for number in range(seconds * FPS):
            start = number % (still.shape[1] - width)
            view = np.ascontiguousarray(still[:, start : start + width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(view, format="rgb24")))
        container.mux(stream.encode())


def milliseconds(read: Callable[[int], object], frames: np.ndarray) -> list[float]:
    found = []
    for number in frames.tolist():
        begin = time.perf_counter()
        read(number)
        found.append(1000 * (time.perf_counter() - begin))
    return found


def of_lerobot(python: str, file: Path, frames: np.ndarray) -> list[float]:
    times = [str(number / FPS) for number in frames.tolist()]
    command = [python, "-c", LEROBOT, str(file), *times]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{python} could not read {file} by lerobot:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(options: argparse.Namespace, work: Path) -> Result:
    other = "PyAV from the start" if options.against is None else "lerobot"
    rows, found = [], {}
    for name, group in GROUPS.items():
        file = work / f"group{group}.mp4"
        write_video(file, options.seconds, group)
        frames = np.random.default_rng(1).integers(0, options.seconds * FPS, options.frames)
        here = milliseconds(partial(read_here, file), frames)
        if options.against is None:
            there = milliseconds(
                partial(read_from_start, VideoFile(file)), frames[:MOST_FROM_START]
            )
        else:
            there = of_lerobot(options.against, file, frames)
        ratio = float(np.median(there) / np.median(here))
        rows.append([name, spread(here), spread(there), f"{ratio:.1f}"])
        found[name] = {"here_ms": here, "there_ms": there}
    columns = ["key frames", "here, ms a frame", f"{other}, ms a frame", "ratio of medians"]
    note = f"H.264, {SIZE[1]} x {SIZE[0]}, {options.seconds} s at {FPS} frames per second."
    return Result([Table("lerobot access", columns, rows, note)], found)


def read_here(file: Path, number: int) -> object:
    return read_frames(file, [number / FPS], 1e-4)


def read_from_start(video: VideoFile, number: int) -> object:
    return list(video.frames([number]))


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--against", metavar="PYTHON", help="an interpreter that has lerobot")
    add_count(made, "seconds", 600, "length of the videos")
    add_count(made, "frames", 200, "frames that are read")
    sys.exit(run(made, compare))
