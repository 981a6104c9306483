"""Video files: frames by number, and errors of bad files.

Guarantees: frames by number equal those of a full decode in every container, also with an odd
number of frames; the frame count equals that of decoding, also where the container states none or
hides frames; a stated display matrix is applied, as by FFmpeg; cover pictures are no films; frames
are decoded one at a time up to the last
requested one; every error names the problem and the remedy; only files need PyAV.
"""

import shutil
import sys
import warnings
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace

import av
import numpy as np
import pytest
from PIL import Image

from paddle_vl.data import video_reader
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.lerobot.videos import read_frames
from paddle_vl.data.video_reader import VideoFrames, frame_rate, open_video
from tests.single_card_tests.data.video_files import (
    decode_all,
    moving_frames,
    set_display_matrix,
    write_cover_first,
    write_hidden_start,
    write_sound,
    write_video,
)

CONTAINERS = [
    ("a.mp4", "libx264", {}),
    ("a.mp4", "mpeg4", {}),
    ("a.mp4", "libx264", {"movflags": "frag_keyframe+empty_moov"}),
    ("a.avi", "mpeg4", {}),
    ("a.mkv", "libx264", {}),
    ("a.webm", "libvpx-vp9", {"cluster_time_limit": "300"}),
    ("a.ts", "libx264", {}),
]


@pytest.mark.parametrize("num_frames", [11, 12])
@pytest.mark.parametrize(("name", "codec", "options"), CONTAINERS)
def test_frames_are_those_of_a_full_decode(tmp_path, name, codec, options, num_frames):
    path = write_video(tmp_path / name, num_frames, codec=codec, **options)
    every = decode_all(path)
    video = open_video(path)
    assert (video.num_frames, video.fps) == (num_frames, 10)
    for indices in ([0, 4, 7, num_frames - 1], list(range(num_frames)), [3]):
        np.testing.assert_array_equal(np.stack(list(video.frames(indices))), every[indices])
    # The red channel is the frame number, so the oracle counts from the same frame.
    reds = every[..., 0].mean(axis=(1, 2))
    written = moving_frames(num_frames)[..., 0].mean(axis=(1, 2))
    assert np.abs(reds - written).max() < 12


def test_frames_come_one_at_a_time_and_end_at_the_last(tmp_path, monkeypatch):
    decoded = []
    plain = video_reader.VideoFile._decode

    def counting(self):
        for frame in plain(self):
            decoded.append(frame)
            yield frame

    monkeypatch.setattr(video_reader.VideoFile, "_decode", counting)
    frames = open_video(write_video(tmp_path / "a.mp4", 12)).frames([2, 5])
    next(frames)
    assert len(decoded) == 3
    assert [frame.shape for frame in frames] == [(32, 48, 3)]
    assert len(decoded) == 6


def test_frames_that_an_edit_list_hides_do_not_count(tmp_path):
    path = write_hidden_start(tmp_path / "cut.mp4", num_frames=20, num_hidden=6)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 20
    video = open_video(path)
    assert video.num_frames == 14
    np.testing.assert_array_equal(np.stack(list(video.frames(range(14)))), decode_all(path))


SHOWN = {
    (1, 0, 0, 1): lambda pixels: pixels,
    (0, 1, -1, 0): lambda pixels: np.rot90(pixels, -1),
    (-1, 0, 0, -1): lambda pixels: np.rot90(pixels, 2),
    (0, -1, 1, 0): np.rot90,
    (-1, 0, 0, 1): np.fliplr,
    (1, 0, 0, -1): np.flipud,
    (0, 1, 1, 0): lambda pixels: pixels.swapaxes(0, 1),
    (0, -1, -1, 0): lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1),
}


@pytest.mark.parametrize("matrix", SHOWN, ids=str)
def test_a_display_matrix_turns_and_mirrors(tmp_path, matrix):
    """The picture is that of `ffmpeg -i` 9.0.2, in LeRobot datasets too."""
    path = set_display_matrix(write_video(tmp_path / "a.mp4", 3, codec="mpeg4"), matrix)
    expected = SHOWN[matrix](decode_all(path)[1])
    for frames in (open_video(path).frames([1]), read_frames(path, [0.1], 0.01)):
        np.testing.assert_array_equal(next(iter(frames)), expected)


def test_a_cover_picture_is_passed_over(tmp_path):
    path = write_cover_first(tmp_path / "a.mp4")
    with av.open(str(path)) as container:
        cover, stream = container.streams.video
        assert cover.codec_context.name == "mjpeg"
        expected = [f.to_ndarray(format="rgb24") for f in container.decode(stream)]
    video = open_video(path)
    assert (video.num_frames, video.fps) == (6, 10)
    np.testing.assert_array_equal(list(video.frames(range(6))), expected)
    np.testing.assert_array_equal(read_frames(path, [0.2], 0.01)[0], expected[2])
    with pytest.raises(BadSampleError, match="no video stream, only: audio, cover picture"):
        open_video(write_cover_first(tmp_path / "a.mp3", "mp3"))


def test_frames_in_memory_are_a_video():
    frames = moving_frames(5)
    video = open_video(VideoFrames(frames, fps=3.0))
    assert (video.num_frames, video.fps) == (5, 3.0)
    np.testing.assert_array_equal(np.stack(list(video.frames([1, 4]))), frames[[1, 4]])
    assert open_video(frames).fps is None


def test_missing_frame_rate_is_taken_as_24_with_a_warning():
    with pytest.warns(UserWarning, match="no frame rate; 24 frames per second are assumed"):
        assert frame_rate(open_video(moving_frames(5))) == 24
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert frame_rate(VideoFrames(moving_frames(5), 3.0)) == 3


def cut_off(path, part):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    return path


def read_all(path):
    video = open_video(path)
    return list(video.frames(range(video.num_frames)))


def damaged(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 3 + 400] = b"\xff" * 400
    path.write_bytes(content)
    return path


def text(path, content=""):
    path.write_text(content)
    return path


BAD = {
    "missing": (lambda path: path, "missing_video", r"no file .*a\.mp4"),
    "folder": (lambda path: path.parent, "missing_video", "no file"),
    "empty": (text, "unreadable_video", "cannot be decoded .*again"),
    "text": (lambda path: text(path, "not a video"), "unreadable_video", "cannot be .*again"),
    "sound": (
        lambda path: write_sound(path.with_suffix(".wav")), "unreadable_video",
        "no video .* only: audio",
    ),
    "one frame": (lambda path: write_video(path, 1), "too_few_frames", r"1 frame\(s\).* 2 "),
    "end": (lambda path: cut_off(write_video(path, 40), 0.9), "unreadable_video", "decoded"),
    "frames": (
        lambda path: cut_off(write_video(path, 40, movflags="faststart"), 0.9), "unreadable_video",
        "decoded",
    ),
    "damaged": (
        lambda path: damaged(write_video(path, 20, codec="mpeg4")), "unreadable_video",
        "decoded|damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_file_that_is_no_good_is_refused_with_its_reason(tmp_path, kind):
    make, fault, message = BAD[kind]
    path = make(tmp_path / "a.mp4")
    with pytest.raises(BadSampleError, match=message) as info:
        read_all(path)
    assert info.value.kind == fault


def test_frame_that_is_cut_in_half_is_refused(tmp_path):
    """FFmpeg decodes the existing half and flags it."""
    path = write_video(tmp_path / "a.avi", 12, codec="mpeg4")
    with av.open(str(path)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(video=0)]
    position, size = packets[5]
    path.write_bytes(path.read_bytes()[: position + size // 2])
    assert len(list(open_video(path).frames([4]))) == 1
    with pytest.raises(BadSampleError, match="the frame at .* is damaged"):
        list(open_video(path).frames([5]))


def test_fewer_frames_than_stated_are_told_with_both_numbers(tmp_path):
    video = open_video(write_video(tmp_path / "a.mp4", 12))
    video.num_frames = 15
    with pytest.raises(BadSampleError, match="states 15 frames but only 12 can be decoded"):
        list(video.frames([0, 14]))


@pytest.mark.parametrize("fps", [0, -5.0, float("nan"), float("inf")])
def test_frame_rate_that_is_not_above_zero_is_refused(fps):
    with pytest.raises(BadSampleError, match="a number above 0 is needed") as info:
        open_video(VideoFrames(moving_frames(4), fps))
    assert info.value.kind == "frame_rate"


def test_file_that_states_no_frame_rate_or_zero(tmp_path, monkeypatch):
    """FFmpeg repairs zeros in headers, so the test replaces its answer."""
    path = write_video(tmp_path / "a.avi", 4, codec="mpeg4")
    stream = SimpleNamespace(average_rate=None, frames=4)
    opened = SimpleNamespace(format=SimpleNamespace(name="avi")), stream
    monkeypatch.setattr(video_reader, "opened_container", lambda path: nullcontext(opened))
    with pytest.warns(UserWarning, match="24 frames per second"):
        assert frame_rate(open_video(path)) == 24
    stream.average_rate = Fraction(0)
    with pytest.raises(BadSampleError, match=r"states 0\.0 frames per second"):
        open_video(path)


@pytest.mark.parametrize("frames", [
    np.zeros((4, 8, 8, 3), np.float32), np.zeros((4, 8, 8), np.uint8), [[1]],
])  # fmt: skip
def test_frames_of_another_form_are_refused(frames):
    with pytest.raises(BadSampleError, match=r"uint8 array \[frames, height, width, 3\]"):
        open_video(VideoFrames(frames, 2.0))


def test_pyav_is_needed_for_files_only(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", 4)
    monkeypatch.setitem(sys.modules, "av", None)
    assert open_video(VideoFrames(np.zeros((2, 4, 4, 3), np.uint8), 1.0)).num_frames == 2
    with pytest.raises(RuntimeError, match=r"a\.mp4: .*pip install 'av>=17'"):
        open_video(path)


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
    ("a.mov", "libx264"), ("a.flv", "flv"), ("a.asf", "mpeg4"), ("a.mpg", "mpeg1video"),
    ("a.gif", "gif"),
])  # fmt: skip
def test_further_containers_are_opened(tmp_path, name, codec):
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
    path = write_video(tmp_path / "a.mkv", 3, codec="mpeg4", title="XXXXXXXX")
    content = path.read_bytes()
    assert b"XXXXXXXX" in content
    path.write_bytes(content.replace(b"XXXXXXXX", b"\xff" * 8))
    assert open_video(path).num_frames == 3
