"""Small video files for tests."""

from pathlib import Path

import av
import numpy as np


def moving_frames(num_frames: int, height: int = 32, width: int = 48) -> np.ndarray:
    """`[R, H, W, 3]` uint8: a moving bar; the red channel is the frame number."""
    frames = np.zeros((num_frames, height, width, 3), dtype=np.uint8)
    for number, frame in enumerate(frames):
        frame[..., 0] = 250 * number // max(num_frames - 1, 1)
        frame[4 * number % height :, :, 2][:4] = 200
    return frames


def write_video(
    path: Path,
    num_frames: int,
    fps: int = 10,
    codec: str = "libx264",
    size: tuple[int, int] = (32, 48),
    **options: str,
) -> Path:
    """Write moving frames of `size` (height, width) with the container's options."""
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        for frame in moving_frames(num_frames, *size):
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def decode_all(path: Path) -> np.ndarray:
    """`[R, H, W, 3]` uint8: all frames of the file."""
    with av.open(str(path)) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


def write_sound(path: Path) -> Path:
    """Write a file with sound and no video."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
        frame.sample_rate = 8000
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    return path


def write_hidden_start(path: Path, num_frames: int, num_hidden: int) -> Path:
    """Write an MP4 whose edit list hides the first frames, as cutting without re-encoding does."""
    whole = write_video(path.with_name("whole.mp4"), num_frames, codec="mpeg4")
    options = {"avoid_negative_ts": "disabled", "use_editlist": "1"}
    with av.open(str(whole)) as source, av.open(str(path), "w", options=options) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                shift = num_hidden * packet.duration
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
                packet.stream = stream
                target.mux(packet)
    return path
