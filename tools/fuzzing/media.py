"""Images and videos."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from fuzzing.mutations import damaged_bytes, in_file
from fuzzing.parser import Parser
from paddle_vl.data import media_file
from paddle_vl.data.media_file import image_size, load_rgb
from paddle_vl.data.video_reader import open_video

_PLAYLISTS = [
    b"#EXTM3U\n#EXTINF:1,\npart.ts\n", b"ffconcat version 1.0\nfile part.ts\n",
    b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nm=video 9 RTP/AVP 96\r\n", b"%!PS-Adobe-3.0 EPSF-3.0\n",
    b"<?xml version='1.0'?><svg/>", b"<MPD></MPD>", b"P6 200 200 255\n", b"",
    b"P5 1 1 65535\n\0\0", b"GIF89a", b"BM", b"RIFF\xff\xff\xff\xffWEBPVP8X",
]  # fmt: skip


def images(folder: Path) -> Parser:
    """Image files of all supported formats and of some others."""
    seeds = _pictures()
    file = folder / "picture"
    file.write_bytes(seeds[0])
    media_file._MOST_PIXELS = 10_000

    def parse() -> None:
        image_size(file)
        if load_rgb(file).mode != "RGB":
            raise AssertionError("not RGB")

    pngs = [seed for seed in seeds if seed.startswith(b"\x89PNG")]
    files = damaged_bytes(seeds)
    inputs = st.one_of(files, files, _damaged_png(pngs), st.sampled_from(_PLAYLISTS))
    return Parser(in_file("picture", inputs), parse)


def _pictures() -> list[bytes]:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 13, 4), dtype=np.uint8)
    rgba = Image.fromarray(pixels)
    rgb, grey, palette = rgba.convert("RGB"), rgba.convert("L"), rgba.convert("P")
    exif = Image.Exif()
    exif[0x0112] = 6
    saved = [
        (rgb, "PNG", {}), (rgba, "PNG", {}), (palette, "PNG", {"transparency": 3}),
        (grey, "PNG", {}), (rgb, "JPEG", {"exif": exif}),
        (grey, "JPEG", {"progressive": True}), (rgb, "BMP", {}),
        (palette, "BMP", {}), (palette, "GIF", {"save_all": True, "append_images": [palette]}),
        (rgb, "TIFF", {"compression": "raw"}), (rgb, "TIFF", {"compression": "tiff_lzw"}),
        (rgb, "WEBP", {}), (rgba, "WEBP", {"lossless": True}), (rgb, "PPM", {}), (grey, "PPM", {}),
        (rgb.convert("CMYK"), "JPEG", {}), (grey.convert("1"), "TIFF", {"compression": "group4"}),
        (grey.convert("I;16"), "PNG", {}), (rgb, "JPEG2000", {}), (rgb, "ICO", {}),
    ]  # fmt: skip
    found = []
    for image, kind, options in saved:
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        found.append(stream.getvalue())
    return found


@st.composite
def _damaged_png(draw, seeds: list[bytes]) -> bytes:
    """A PNG with changed chunks and correct checksums."""
    data = draw(st.sampled_from(seeds))
    chunks, at = [], 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += length + 12
    chunks.insert(draw(st.integers(1, len(chunks))), _odd_chunk(draw))
    which = draw(st.integers(0, len(chunks) - 1))
    chunks[which] = chunks[which][0], draw(damaged_bytes([chunks[which][1]], 2))
    return data[:8] + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def _odd_chunk(draw) -> tuple[bytes, bytes]:
    long = zlib.compress(bytes(1 << 12))
    chunks = [
        (b"tEXt", b"a\0b"), (b"zTXt", b"a\0\0" + long), (b"iTXt", b"a\0\1\0\0\0" + long),
        (b"iCCP", b"a\0\0" + long), (b"tRNS", b"\0\1"), (b"eXIf", b"MM\0*\0\0\0\x08\0\1"),
        (b"acTL", struct.pack(">II", 9, 0)), (b"fcTL", bytes(26)), (b"gAMA", b"\0\0"),
        (b"PLTE", b"abc"), (b"sRGB", b""), (b"pHYs", b"1"), (b"IEND", b""),
    ]  # fmt: skip
    return draw(st.sampled_from(chunks))


def write_video(file: Path, codec: str, frames: int = 6) -> Path:
    """Write frames with a moving bar."""
    import av

    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width = 32, 48
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        for number in range(frames):
            pixels = np.zeros((32, 48, 3), np.uint8)
            pixels[4 * number : 4 * number + 4] = 200
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file


def videos(folder: Path) -> Parser:
    """Videos in several containers; all frames are read."""
    kinds = [
        ("a.mp4", "libx264"), ("b.mp4", "mpeg4"), ("c.mkv", "libx264"), ("d.avi", "mpeg4"),
        ("e.webm", "libvpx"), ("f.gif", "gif"), ("g.ts", "mpeg2video"), ("h.flv", "flv1"),
        ("i.mpg", "mpeg1video"),
    ]  # fmt: skip
    seeds = []
    for name, codec in kinds:
        video = write_video(folder / name, codec)
        seeds.append(video.read_bytes())
        video.unlink()
    file = folder / "video"
    file.write_bytes(seeds[0])

    def parse() -> None:
        video = open_video(file)
        for _ in video.frames(range(0, min(video.num_frames, 50), 2)):
            pass

    inputs = st.one_of(damaged_bytes(seeds), damaged_bytes(seeds, 2), st.sampled_from(_PLAYLISTS))
    return Parser(in_file("video", inputs), parse)
