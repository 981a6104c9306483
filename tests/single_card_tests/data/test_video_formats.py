"""Allowed video containers: none makes FFmpeg open other files.

Guarantees: playlists, scripts, patterns and descriptions are refused although their targets exist;
names that look like protocols or patterns are plain names; too large frames are refused.
"""

import shutil

import av
import pytest
from PIL import Image

from paddle_vl.data import video_reader
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.video_reader import open_video
from tests.single_card_tests.data.video_files import write_video


@pytest.fixture
def folder(tmp_path):
    write_video(tmp_path / "real.mp4", 4, size=(16, 16))
    write_video(tmp_path / "part.ts", 4, size=(16, 16))
    for number in range(4):
        Image.new("RGB", (16, 16)).save(tmp_path / f"f{number}.png")
    return tmp_path


PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:2.0,\npart.ts\n#EXT-X-ENDLIST\n"
SCRIPT = "ffconcat version 1.0\nfile real.mp4\n"
NESTING = {
    "a.m3u8": PLAYLIST,
    "m3u8.mp4": PLAYLIST,
    "a.ffconcat": SCRIPT,
    "concat.mp4": SCRIPT,
    "a.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nm=video 5004 RTP/AVP 96\n",
    "a.mpd": '<?xml version="1.0"?><MPD type="static"></MPD>',
}


@pytest.mark.parametrize("name", NESTING)
def test_files_that_name_other_files_are_refused(folder, name):
    (folder / name).write_text(NESTING[name])
    with pytest.raises(BadSampleError, match="cannot be decoded as a video") as info:
        open_video(folder / name)
    assert info.value.kind == "unreadable_video"


@pytest.mark.parametrize("name", ["a.m3u8", "a.ffconcat"])
def test_ffmpeg_itself_would_open_them(folder, name):
    """So this package, not FFmpeg, refuses them."""
    (folder / name).write_text(NESTING[name])
    with av.open(str(folder / name)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 4


def test_a_pattern_of_pictures_is_refused(folder):
    shutil.copy(folder / "f0.png", folder / "f%d.png")
    with pytest.raises(BadSampleError, match="cannot be decoded as a video.*convert it to one of"):
        open_video(folder / "f%d.png")


@pytest.mark.parametrize("name", ["concat:real.mp4", "http:a.mp4", "a%d.mp4", "10:30.mp4"])
def test_names_are_names(folder, name, monkeypatch):
    """Also relative names that begin like an FFmpeg protocol."""
    shutil.copy(folder / "real.mp4", folder / name)
    monkeypatch.chdir(folder)
    for path in (name, folder / name):
        assert len(list(open_video(path).frames([0, 3]))) == 2


@pytest.mark.parametrize(("name", "codec"), [
    ("a.mp4", "libx264"), ("a.mov", "libx264"), ("a.mkv", "libx264"), ("a.webm", "libvpx"),
    ("a.avi", "mpeg4"), ("a.ts", "libx264"), ("a.flv", "flv"), ("a.asf", "mpeg4"),
    ("a.mpg", "mpeg1video"), ("a.gif", "gif"),
])  # fmt: skip
def test_common_containers_are_opened(tmp_path, name, codec):
    if codec == "gif":
        frames = [Image.new("RGB", (16, 16), (50 * i, 0, 0)) for i in range(4)]
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
    else:
        write_video(tmp_path / name, 4, fps=25, codec=codec, size=(16, 16))
    video = open_video(tmp_path / name)
    assert len(list(video.frames(range(video.num_frames)))) == 4


def test_frames_of_absurd_size_are_refused(folder, monkeypatch):
    monkeypatch.setattr(video_reader, "_MOST_PIXELS", 100)
    with pytest.raises(BadSampleError, match="frames of 16 x 16 pixels; at most 100"):
        open_video(folder / "real.mp4")
    # The header states a smaller size than the frames have.
    monkeypatch.setattr(video_reader, "_check_stream", lambda stream: None)
    with pytest.raises(BadSampleError, match="cannot be decoded as a video"):
        list(open_video(folder / "real.mp4").frames([0]))


def test_broken_letters_in_a_title_are_no_fault(tmp_path):
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        container.metadata["title"] = "XXXXXXXX"
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        for _ in range(3):
            for packet in stream.encode(av.VideoFrame(16, 16, "yuv420p")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    content = path.read_bytes()
    assert b"XXXXXXXX" in content
    path.write_bytes(content.replace(b"XXXXXXXX", b"\xff" * 8))
    assert open_video(path).num_frames == 3
