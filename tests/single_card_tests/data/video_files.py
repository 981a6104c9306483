"""Small video files for tests."""

import struct
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
    title: str = "",
    **options: str,
) -> Path:
    """Write moving frames of `size` (height, width) with the container's options."""
    with av.open(str(path), "w", options=options) as container:
        container.metadata["title"] = title
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


def set_display_matrix(path: Path, matrix: tuple[int, int, int, int]) -> Path:
    """Give an MP4 another display matrix: a, b, c and d of (a x + c y, b x + d y)."""
    a, b, c, d = (each << 16 for each in matrix)
    content = bytearray(path.read_bytes())
    # Of the track's header, in 16.16 and 2.30 fixed point.
    at = content.index(b"tkhd") + 44
    content[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    return path


def write_cover_first(path: Path, codec: str = "mpeg4") -> Path:
    """Write an MP4 whose first stream is a cover picture before six frames; with an audio codec an
    MP3 with a cover."""

    def picture(pixels: np.ndarray) -> av.VideoFrame:
        return av.VideoFrame.from_ndarray(pixels, format="rgb24")

    sound = av.AudioFrame.from_ndarray(np.zeros((1, 4410), np.int16), layout="mono")
    sound.sample_rate = 44100
    with av.open(str(path), "w") as container:
        cover = container.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 16, 16, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        frames = [sound]
        if codec == "mpeg4":
            stream = container.add_stream(codec, rate=10)
            stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
            frames = [*map(picture, moving_frames(6))]
        else:
            stream = container.add_stream(codec, rate=44100)
        for each, given in ((cover, [picture(moving_frames(1, 16, 16)[0])]), (stream, frames)):
            for frame in [*given, None]:
                container.mux(each.encode(frame))
    if codec == "mpeg4":
        # As some taggers write it: the box of the cover in front of those of the tracks.
        content = path.read_bytes()
        track, tags = (content.index(name) - 4 for name in (b"trak", b"udta"))
        end = tags + int.from_bytes(content[tags : tags + 4], "big")
        moved = content[tags:end] + content[track:tags]
        path.write_bytes(content[:track] + moved + content[end:])
    return path


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
