"""Data: documents and conversations in files of every kind, demonstrations, images, videos.

Guarantees: see `checking.check`. Limits are lowered, so that what they bound is seen in small
files.
"""

import gzip
import io
import tarfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import reject
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from paddle_vl.config.data_sources import SourceConfig
from paddle_vl.data import media_file
from paddle_vl.data.corpus import cache as corpus_cache
from paddle_vl.data.corpus.cache import _opened_copy, opened_file
from paddle_vl.data.corpus.table_shard import _record_batch, _row_group
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import image_size, load_rgb
from paddle_vl.data.video_reader import open_video
from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.policy.demonstrations.sample import OPTIONAL_FIELDS, DemonstrationShapes
from paddle_vl.families.policy.features import PolicyFeature
from paddle_vl.families.policy.normalize import Normalizer, read_statistics
from paddle_vl.families.vlm.inputs.corpus import Corpus
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from paddle_vl.families.vlm.settings import VLDataConfig
from tests.single_card_tests.damaged.checking import check
from tests.single_card_tests.damaged.damage import (
    as_json,
    cut_off,
    damaged,
    in_file,
    json_lines,
    mutated,
    one_damaged,
)
from tests.single_card_tests.data.video_files import write_video
from tests.single_card_tests.families.qwen3_vl.chat_builders import random_image, tiny_processor

COPY = 1 << 16
PLAYLISTS = [
    b"#EXTM3U\n#EXTINF:1,\npart.ts\n", b"ffconcat version 1.0\nfile part.ts\n",
    b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nm=video 9 RTP/AVP 96\r\n", b"%!PS-Adobe-3.0 EPSF-3.0\n",
    b"<?xml version='1.0'?><svg/>", b"<MPD></MPD>", b"P6 200 200 255\n", b"", b"GIF89a", b"BM",
    b"P5 1 1 65535\n\0\0", b"RIFF\xff\xff\xff\xffWEBPVP8X",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _lower_limits(monkeypatch):
    monkeypatch.setattr(corpus_cache, "_ALWAYS_FINE", COPY)
    monkeypatch.setattr(media_file, "_MOST_PIXELS", 10_000)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


ANSWER = {"role": "assistant", "content": "A cat."}
PICTURE = {"type": "image", "image": "cat.png"}
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [user("<image>What?"), ANSWER], "images": ["cat.png"]},
    {"messages": [user("What is this?"), ANSWER]},
    {"messages": [user("<video>"), ANSWER], "videos": ["clip.mp4"], "id": 1},
    {"messages": [user([PICTURE, {"type": "text", "text": "What?"}]), ANSWER]},
    {"messages": [user([{"type": "video", "path": "clip.mp4"}]), ANSWER], "system": "Be short."},
    {"messages": [{"role": "system", "content": "Be short."}, user("Hi"), ANSWER | {"loss": False},
                  user("And?"), ANSWER | {"loss": True}], "label": None},
    {"messages": [user("Hi"), ANSWER, user("No"), ANSWER], "label": [False, True]},
    {"messages": [user("Hi"), ANSWER], "images_path": ["cat.png"], "history": [], "mask": []},
]  # fmt: skip
DOCUMENTS: list[dict[str, Any]] = [
    {"image": "cat.png", "text": "A cat."},
    {"text": "A cat on a mat."},
    {"text": ["A cat", "on a mat."], "url": "x"},
    {"image": {"path": "cat.png", "bytes": None}, "text": "A cat."},
    {"texts": ["A cat", None, "on a mat."], "images": [None, "cat.png", None]},
    {"text_list": ["A cat"], "image_info": [{"image_name": "cat.png", "matched_text_index": 0}]},
]


def as_table(rows: Sequence[Any]) -> bytes:
    """Rows in a Parquet file; those of several types are no table."""
    file = io.BytesIO()
    try:
        parquet.write_table(pa.Table.from_pylist(list(rows)), file)
    except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError):
        reject()
    return file.getvalue()


def as_archive(rows: Sequence[Any]) -> bytes:
    """Rows in a WebDataset file, each with a picture."""
    file, picture = io.BytesIO(), io.BytesIO()
    random_image(16, 8).save(picture, "PNG")
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, row in enumerate(rows):
            for name, content in (("json", as_json(row)), ("png", picture.getvalue())):
                member = tarfile.TarInfo(f"{number}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def as_lines(rows: Sequence[Any]) -> bytes:
    return b"\n".join(map(as_json, rows)) + b"\n"


CONTAINERS: dict[str, Callable[[Sequence[Any]], bytes]] = {
    "rows.jsonl.zst": lambda rows: zstandard.compress(as_lines(rows)),
    "rows.jsonl.gz": lambda rows: gzip.compress(as_lines(rows), 1),
    "rows.parquet": as_table,
    "rows.tar": as_archive,
}


def forget_files() -> None:
    """Close what readers keep open, which a new process has not."""
    for kept in (opened_file, _opened_copy, _row_group, _record_batch):
        kept.cache_clear()


@pytest.mark.parametrize("name", CONTAINERS)
def test_conversations_in_a_container(name, folder):
    """Read as a new process would."""
    random_image(16, 8).save(folder / "cat.png")
    pack, seeds, file = CONTAINERS[name], CONVERSATIONS[:2], folder / name
    if name.endswith("tar"):
        seeds = [seeds[0] | {"images": ["png"]}, seeds[1]]
    file.write_bytes(pack(seeds[:1]))
    processor, cache = tiny_processor(), folder / "cache"
    cache.mkdir()
    source = SourceConfig(path=str(file), format="messages")
    data = VLDataConfig(max_length=60, allow_outside=False, max_line_bytes=1024, cache=str(cache))

    def parse() -> None:
        forget_files()
        for kept in cache.iterdir():
            kept.unlink()
        try:
            samples = Corpus.opened([source], data, processor, seed=0).samples()
            for number in range(min(len(samples), 20)):
                samples[number]
        finally:
            # A copy is at most 200 times its file; its index has 8 bytes per line of 16 or more.
            size = sum(kept.stat().st_size for kept in cache.iterdir())
            assert size <= 1.6 * max(COPY, 200 * file.stat().st_size)

    rows = st.lists(mutated(seeds, 1), min_size=1, max_size=3).map(pack)
    harm = cut_off if name.endswith("parquet") else damaged
    inputs = st.one_of(rows, rows, harm([file.read_bytes()]))
    if name.startswith("rows.jsonl"):
        compress = zstandard.compress if name.endswith("zst") else gzip.compress
        long = st.sampled_from([b"x", b"\n", b" ", b"[", b'{"messages": []}\n'])
        inputs = st.one_of(inputs, long.map(lambda piece: compress(piece * (COPY // len(piece)))))
    check(folder, parse, in_file(name, inputs), "rows")


def test_texts_captions_and_pages(folder):
    """Some format reads some of them."""
    random_image(16, 8).save(folder / "cat.png")
    file, processor = folder / "rows.jsonl", tiny_processor()
    file.write_bytes(as_json(DOCUMENTS[0]))
    data = VLDataConfig(max_length=60, allow_outside=False, on_bad_sample="skip")

    def parse() -> None:
        refused, num_good = [], 0
        for kind in ("text", "image_text", "interleaved"):
            source = SourceConfig(path=str(file), format=kind)
            samples = Corpus.opened([source], data, processor, seed=0).samples()
            for number in range(len(samples)):
                try:
                    samples[number]
                    num_good += 1
                except BadSampleError as error:
                    refused.append(error)
        if refused and not num_good:
            raise refused[0]

    check(folder, parse, in_file(file.name, json_lines(DOCUMENTS, 1)), file.name)


@pytest.mark.parametrize(("mode", "most"), [("fail", 1), ("skip", 4)])
def test_conversations(mode, most, folder):
    """Read into tokens; bad lines are skipped or end the run."""
    random_image(16, 8).save(folder / "cat.png")
    write_video(folder / "clip.mp4", 6, codec="mpeg4")
    file, processor = folder / "rows.jsonl", tiny_processor()
    file.write_bytes(as_json(CONVERSATIONS[0]))

    def parse() -> None:
        dataset = MessagesDataset([file], processor, 60, mode, allow_outside=False)
        for number in range(len(dataset)):
            try:
                dataset.lengths(number)
                dataset[number]
                dataset.conversation(number).check_targets()
            except BadSampleError:
                if mode == "fail":
                    raise

    check(folder, parse, in_file(file.name, json_lines(CONVERSATIONS, most)), file.name)


def test_demonstrations(folder):
    for name in ("0.png", "1.png"):
        random_image(12, 12).save(folder / name)
    full = {
        "state": [[0.1, 0.2], [0.3, 0.4]], "camera0": ["0.png", "1.png"], "prompt": "stack them",
        "actions": [[0.0, 1.0], [1.0, 0.0]], "subgoal0": "1.png", "response": "grasp", "speed": 50,
        "quality": 3, "mistake": False, "fps": 30, "robot_type": "arm", "control_mode": "joint",
        "past_memory": "a", "next_memory": "b",
    }  # fmt: skip
    short = {"state": [0.1, 0.2], "camera0": "0.png", "prompt": "go", "actions": [[0, 1]]}
    file = folder / "moments.jsonl"
    file.write_bytes(as_json(full))
    shapes = DemonstrationShapes(("camera0",), (8, 8), 2, 2, 3, 2)

    def parse() -> None:
        dataset = DemonstrationsDataset([file], shapes, OPTIONAL_FIELDS, allow_outside=False)
        for number in range(len(dataset)):
            dataset.motion(number)
            dataset[number]

    lines = json_lines([full, short, full | {"subgoal0": None, "speed": None}], 2)
    check(folder, parse, in_file(file.name, lines), file.name)


def test_statistics(folder):
    """Used to normalize values and back."""
    vector = {
        "mean": [0.0, 1.0], "std": [1.0, 0.5], "min": [-1.0, 0.0], "max": [1.0, 2.0],
        "q01": [-0.9, 0.1], "q99": [0.9, 1.9], "count": [10],
    }  # fmt: skip
    group = {"state": vector, "actions": vector}
    (folder / "statistics.json").write_bytes(as_json({"arm": group}))
    features = {"state": PolicyFeature("STATE", (2,)), "actions": PolicyFeature("ACTION", (2,))}
    batch = {name: np.ones((1, 3, 2), np.float32) for name in features}

    def parse() -> None:
        groups = list(read_statistics(folder / "statistics.json").values())
        for mode in ("MEAN_STD", "MIN_MAX", "QUANTILE"):
            normalizer = Normalizer(features, {"STATE": mode, "ACTION": mode}, 1, len(groups))
            normalizer.set_statistics(groups)
            index_B = np.zeros(1, np.int64)
            normalizer.unnormalize(normalizer.normalize(batch, index_B), index_B)

    inputs = one_damaged(folder, "*", {"arm": group, "other": group})
    check(folder, parse, inputs, "statistics.json", "the statistics")


def test_images(folder):
    """Of all supported formats, and of some others."""
    rgba = random_image(9, 13).convert("RGBA")
    rgb, grey, palette = (rgba.convert(mode) for mode in ("RGB", "L", "P"))
    exif = Image.Exif()
    exif[0x0112] = 6
    saved: list[tuple[Image.Image, str, dict[str, Any]]] = [
        (rgb, "PNG", {}), (rgba, "PNG", {}), (palette, "PNG", {"transparency": 3}),
        (grey.convert("I;16"), "PNG", {}), (rgb, "JPEG", {"exif": exif}),
        (grey, "JPEG", {"progressive": True}), (rgb.convert("CMYK"), "JPEG", {}), (rgb, "BMP", {}),
        (palette, "GIF", {"save_all": True, "append_images": [palette]}), (rgb, "WEBP", {}),
        (rgb, "TIFF", {"compression": "raw"}),
        (rgb, "PPM", {}), (rgb, "JPEG2000", {}), (rgb, "ICO", {}),
    ]  # fmt: skip
    seeds, file = [], folder / "picture"
    for image, kind, options in saved:
        image.save(file, kind, **options)
        seeds.append(file.read_bytes())
    file.write_bytes(seeds[0])

    def parse() -> None:
        image_size(file)
        assert load_rgb(file).mode == "RGB"

    check(folder, parse, in_file(file.name, st.one_of(damaged(seeds), st.sampled_from(PLAYLISTS))))


def test_videos(folder):
    """In several containers; all frames are read."""
    kinds = [
        ("a.mp4", "libx264"), ("c.mkv", "libx264"), ("d.avi", "mpeg4"), ("e.webm", "libvpx"),
        ("g.ts", "mpeg2video"), ("h.flv", "flv1"), ("b.mp4", "mpeg4"),
    ]  # fmt: skip
    seeds, file = [], folder / "video"
    for name, codec in kinds:
        write_video(folder / name, 6, 25, codec).rename(file)
        seeds.append(file.read_bytes())

    def parse() -> None:
        video = open_video(file)
        for _ in video.frames(range(0, min(video.num_frames, 50), 2)):
            pass

    check(folder, parse, in_file(file.name, st.one_of(cut_off(seeds), st.sampled_from(PLAYLISTS))))
