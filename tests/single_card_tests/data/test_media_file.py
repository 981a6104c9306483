"""Image files, and the paths that data may name.

Guarantees: transparent pixels become white in all modes, other images are unchanged; unsupported
formats are refused without being parsed; too large images are refused before decoding;
animations give their first frame. Absolute paths, `../` and links that leave the data file's folder
are read, or refused if `allow_outside` is off: for images and videos, conversations and
demonstrations, at opening and at reading. Paths that lead back into the folder are inside.
"""

import pickle
import struct
import zlib

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from paddle_vl.data import media_file
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import FORMATS, image_size, load_rgb
from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from tests.single_card_tests.data.video_files import write_video
from tests.single_card_tests.families.pi07.demonstration_builders import SHAPES, line, write_lines
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    question,
    random_image,
    tiny_processor,
    write_jsonl,
)

RED = (255, 0, 0)
WHITE = (255, 255, 255)


def random_rgba(seed=0):
    values = np.random.default_rng(seed).integers(0, 256, (8, 8, 4), dtype=np.uint8)
    values[..., 3].flat[:8] = 0
    values[..., 3].flat[8:16] = 255
    return values


def test_transparency_is_put_on_white(tmp_path):
    values = random_rgba()
    Image.fromarray(values).save(tmp_path / "a.png")
    alpha = values[..., 3:] / 255
    expected = values[..., :3] * alpha + 255 * (1 - alpha)
    for source in (tmp_path / "a.png", Image.fromarray(values)):
        found = np.asarray(load_rgb(source))
        # Pillow rounds to the nearest level.
        assert np.abs(found - expected).max() <= 0.5
        np.testing.assert_array_equal(found.reshape(-1, 3)[:8], 255)
        np.testing.assert_array_equal(found.reshape(-1, 3)[8:16], values.reshape(-1, 4)[8:16, :3])


def two_pixels(mode: str) -> tuple[Image.Image, object]:
    """A transparent and an opaque pixel, and what is transparent in the file."""
    if mode in ("LA", "PA"):
        image = Image.new(mode, (2, 1), (0, 0))
        if mode == "PA":
            image.putpalette([0, 0, 0, 200, 200, 200])
        image.putpixel((1, 0), (1 if mode == "PA" else 200, 255))
        return image, None
    image = Image.new("RGB", (2, 1), "black")
    image.putpixel((1, 0), (200, 200, 200))
    if mode == "RGB":
        return image, (0, 0, 0)
    image = image.convert("L") if mode == "L" else image.quantize(2)
    return image, image.getpixel((0, 0))


@pytest.mark.parametrize("mode", ["LA", "PA", "P", "L", "RGB", "GIF"])
def test_every_kind_of_transparency_is_put_on_white(tmp_path, mode):
    image, key = two_pixels(mode)
    path = tmp_path / ("a.gif" if mode == "GIF" else "a.png")
    if mode != "PA":
        image.save(path, **({} if key is None else {"transparency": key}))
    found = load_rgb(image if mode == "PA" else path)
    assert [found.getpixel((x, 0)) for x in range(2)] == [WHITE, (200, 200, 200)]


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tiff", "a.webp", "a.jpg", "a.ppm"])
def test_images_without_transparency_are_left_to_the_bit(tmp_path, name):
    options = {"lossless": True} if name == "a.webp" else {}
    random_image(16, 24).save(tmp_path / name, **options)
    with Image.open(tmp_path / name) as image:
        np.testing.assert_array_equal(np.asarray(load_rgb(tmp_path / name)), np.asarray(image))


def test_opaque_alpha_changes_nothing():
    values = random_rgba()
    values[..., 3] = 255
    np.testing.assert_array_equal(np.asarray(load_rgb(Image.fromarray(values))), values[..., :3])


@pytest.mark.parametrize("format", ["EPS", "PDF", "ICO", "PCX", "TGA", "ICNS", "SGI", "JPEG2000"])
def test_other_formats_are_refused(tmp_path, format, monkeypatch):
    path = tmp_path / "a.png"
    random_image(16, 16).save(path, format)

    def never(*arguments, **options):
        raise AssertionError("Ghostscript was asked for")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", never)
    for read in (load_rgb, image_size):
        with pytest.raises(BadSampleError, match=", ".join(FORMATS)) as info:
            read(path)
        assert info.value.kind == "unreadable_image"


def png_header(width, height):
    """A PNG that states this size and has almost no data."""

    def chunk(name, content):
        body = name + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 10))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize("read", [load_rgb, image_size])
def test_too_large_images_are_refused_by_their_header(tmp_path, read, monkeypatch):
    """By this limit, and before it by Pillow's."""
    monkeypatch.setattr(media_file, "_MOST_PIXELS", 100)
    (tmp_path / "a.png").write_bytes(png_header(10, 11))
    with pytest.raises(BadSampleError, match="states 10 x 11 pixels; at most 100 are"):
        read(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(png_header(10, 10))
    assert image_size(tmp_path / "b.png") == (10, 10)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    with pytest.raises(BadSampleError, match=r"110 pixels.*exceeds"):
        read(tmp_path / "a.png")


def test_an_image_that_is_given_is_left_as_it_is():
    image = Image.new("RGB", (2, 1), "black")
    image.getexif()[0x0112] = 6
    assert load_rgb(image).size == (1, 2)
    assert image.size == (2, 1)


@pytest.mark.parametrize("content", [b"", b"\0", b"BM", png_header(0, 5), png_header(8, 8)])
def test_broken_files_are_refused(tmp_path, content):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(BadSampleError, match="cannot be decoded as an image") as info:
        load_rgb(tmp_path / "a.png")
    assert info.value.kind == "unreadable_image"


@pytest.mark.parametrize("path", ["a\0.png", "a" * 5000, "gone.png", "."])
def test_paths_that_are_no_files_are_refused(path):
    for read in (load_rgb, image_size):
        with pytest.raises(BadSampleError, match="there is no file") as info:
            read(path)
        assert len(str(info.value)) < 400


@pytest.mark.parametrize("name", ["a.gif", "a.png", "a.webp", "a.tiff"])
def test_of_an_animation_the_first_frame_is_taken(tmp_path, name):
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if name == "a.webp" else {}
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], **options)
    assert load_rgb(tmp_path / name).getpixel((4, 4)) == RED


PROCESSOR = tiny_processor()


@pytest.fixture
def folder(tmp_path):
    """`data/` with images of its own, and images and links next to it and below it."""
    inside = tmp_path / "data"
    inside.mkdir()
    (tmp_path / "data2").mkdir()
    for place in (tmp_path, inside, tmp_path / "data2"):
        random_image(8, 8).save(place / "a.png")
        write_video(place / "v.mp4", 4, size=(16, 16))
    (inside / "link.png").symlink_to(tmp_path / "a.png")
    (inside / "linked").symlink_to(tmp_path / "data2")
    (inside / "own.png").symlink_to("a.png")
    return inside


OUTSIDE = ["../a.png", "{outer}/a.png", "file://{outer}/a.png", "link.png", "linked/a.png",
           "../data2/a.png"]  # fmt: skip
INSIDE = ["a.png", "own.png", "../data/a.png", "{outer}/data/a.png", "linked/../data/a.png"]


def conversations(folder, path, **options):
    row = question("<image>", images=[path])
    return MessagesDataset([write_jsonl(folder / "a.jsonl", [row])], PROCESSOR, **options)


def demonstrations(folder, path, **options):
    row = line(folder, 1, camera1=[path.removeprefix("file://")])
    return DemonstrationsDataset([write_lines(folder / "d.jsonl", row)], SHAPES, **options)


@pytest.mark.parametrize("opened", [conversations, demonstrations])
@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_that_lead_outside_are_taken_or_refused(folder, opened, path):
    path = path.format(outer=folder.parent)
    assert opened(folder, path)[0]
    message = r"jsonl:1: .*a\.png.*outside the folder .*data\.allow_outside is false: move"
    with pytest.raises(BadSampleError, match=message) as info:
        opened(folder, path, allow_outside=False)
    assert info.value.kind == "outside_path"


@pytest.mark.parametrize("opened", [conversations, demonstrations])
@pytest.mark.parametrize("path", INSIDE)
def test_paths_that_stay_inside_are_taken(folder, opened, path):
    assert opened(folder, path.format(outer=folder.parent), allow_outside=False)[0]


def test_videos_and_goals_are_no_exception(folder):
    row = question("<video>", videos=["../v.mp4"])
    file = write_jsonl(folder / "a.jsonl", [row])
    assert MessagesDataset([file], PROCESSOR)[0]
    with pytest.raises(BadSampleError, match=r"video path '\.\./v\.mp4' leads to"):
        MessagesDataset([file], PROCESSOR, allow_outside=False)
    file = write_lines(folder / "d.jsonl", line(folder, 1, subgoal0="../a.png"))
    with pytest.raises(BadSampleError, match=r"'subgoal0' path '\.\./a\.png' leads to"):
        DemonstrationsDataset([file], SHAPES, ["subgoal"], allow_outside=False)


def test_a_link_that_is_turned_later_is_refused_when_reading(folder):
    dataset = conversations(folder, "own.png", allow_outside=False)
    (folder / "own.png").unlink()
    (folder / "own.png").symlink_to(folder.parent / "a.png")
    with pytest.raises(BadSampleError, match="outside the folder"):
        dataset[0]


def test_the_folder_may_be_a_link_itself(folder):
    linked = folder.parent / "through"
    linked.symlink_to(folder)
    assert conversations(linked, "a.png", allow_outside=False)[0]


def test_a_section_of_an_image_is_what_its_corners_surround(tmp_path):
    pixels = np.arange(8 * 12 * 3, dtype=np.uint8).reshape(8, 12, 3)
    exif = Image.Exif()
    exif[0x0112] = 6
    for name, more in {"plain.png": {}, "turned.png": {"exif": exif}}.items():
        Image.fromarray(pixels).save(tmp_path / name, **more)
    upright = {"plain.png": pixels, "turned.png": np.rot90(pixels, 3)}
    for name, whole in upright.items():
        section = media_file.ImageSection(name, (2.5, 1, 6, 1, 6.2, 4, 2.5, 3.1))
        folder = media_file.MediaFolder(tmp_path)
        section = pickle.loads(pickle.dumps(media_file.media_source(section, "image", "x", folder)))
        assert np.array_equal(np.asarray(load_rgb(section)), whole[1:4, 2:7])
        assert image_size(section) == media_file.upright_size(section) == (5, 3)
        # What is outside is left.
        outer = media_file.ImageSection(section.file, (-5, -5, 3, 100))
        assert np.array_equal(np.asarray(load_rgb(outer)), whole[:, :3])
        with pytest.raises(BadSampleError, match="have no pixel of the image of"):
            load_rgb(media_file.ImageSection(section.file, (50, 0, 60, 5)))
