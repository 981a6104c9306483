"""Invalid processor files.

Guarantees: settings that would make every pixel wrong, and tokenizers that the library refuses, are
refused with file, key and value.
"""

import json
import shutil

import pytest

from paddle_vl.families.vlm.inputs.image_processor import ImageProcessor
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer
from paddle_vl.families.vlm.inputs.video_processor import VideoProcessor
from tests.single_card_tests.train.tiny_run import write_tiny_run

NAN = float("nan")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_tiny_run(tmp_path_factory.mktemp("run")).with_name("processor")


@pytest.fixture
def processor(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "processor")


def change(file, name, value):
    values = json.loads(file.read_text())
    if isinstance(value, type) and value is KeyError:
        del values[name]
    else:
        values[name] = value
    file.write_text(json.dumps(values))


SETTINGS = [
    ("image_std", [0.5, 0, 0.5]), ("image_std", [0.5, -1, 0.5]), ("image_std", [0.5, NAN, 0.5]),
    ("image_std", [0.5, 0.5]), ("image_std", 0.5), ("image_std", ["a", 1, 1]),
    ("image_std", [True, 1, 1]), ("image_mean", [NAN, 0, 0]), ("image_mean", [0.5] * 4),
    ("image_mean", [10**30, 0, 0]), ("image_mean", "0.5"), ("patch_size", 0), ("patch_size", 2.0),
    ("patch_size", True), ("patch_size", 10**9), ("temporal_patch_size", -1), ("merge_size", "2"),
    ("min_pixels", 0), ("min_pixels", 10**9),
    ("max_pixels", -5), ("max_pixels", "many"), ("rescale_factor", 0),
    ("rescale_factor", "x"), ("rescale_factor", NAN), ("resample", [3]), ("do_resize", "yes"),
    ("do_normalize", 0), ("size", [1, 2]), ("do_center_crop", True), ("do_pad", True),
    ("do_normalize", False), ("do_rescale", False), ("resample", 2), ("rescale_factor", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_settings_of_images_and_videos_are_refused_by_name(processor, name, value):
    images = ImageProcessor.from_pretrained(processor)
    for file, read in (
        ("preprocessor_config.json", ImageProcessor.from_pretrained),
        (
            "video_preprocessor_config.json",
            lambda path: VideoProcessor.from_pretrained(path, images),
        ),
    ):
        change(processor / file, name, value)
        with pytest.raises(ValueError, match=rf"/{file}.*{name}"):
            read(processor)


def test_token_that_every_image_is_enlarged_to_beyond_sense_is_refused(processor):
    file = processor / "preprocessor_config.json"
    change(file, "patch_size", 256)
    change(file, "merge_size", 32)
    with pytest.raises(
        ValueError, match=r"patch_size 256, merge_size 32 and temporal_patch_size 2"
    ):
        ImageProcessor.from_pretrained(processor)


@pytest.mark.parametrize(
    ("name", "value"),
    [("fps", 0), ("fps", -2), ("fps", NAN), ("fps", "2"), ("fps", 10**9), ("min_frames", 2.5),
     ("max_frames", 10**12), ("min_frames", True)],
)  # fmt: skip
def test_settings_of_frames_are_refused_by_name(processor, name, value):
    file = processor / "video_preprocessor_config.json"
    change(file, name, value)
    with pytest.raises(ValueError, match=rf"/{file.name}.*{name}"):
        VideoProcessor.from_pretrained(processor, ImageProcessor.from_pretrained(processor))


DAMAGE = [b"", b"42", b"[]", b"null", b"{", b"\xff\xfe", b"\0", b"[" * 100_000,
          b'{"a": ' + b"7" * 5000 + b"}", b'{"a": 1, "a": 2}']  # fmt: skip


@pytest.mark.parametrize("text", DAMAGE)
@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "preprocessor_config.json", "video_preprocessor_config.json",
     "tokenizer_config.json"],
)  # fmt: skip
def test_damaged_files_are_named(processor, name, text):
    if name == "tokenizer_config.json":
        # Read only if the folder has no template file.
        (processor / "chat_template.jinja").unlink()
    (processor / name).write_bytes(text)
    with pytest.raises(RuntimeError, match=rf"/{name} "):
        VLProcessor.from_pretrained(processor)


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", 3), ("model", {}), ("model", {"type": "BPE"}), ("model", None),
     ("added_tokens", [{"id": -1}]), ("normalizer", "x"), ("pre_tokenizer", {"type": "None"})],
)  # fmt: skip
def test_faults_that_the_library_finds_are_told_with_the_file(processor, name, value):
    change(processor / "tokenizer.json", name, value)
    with pytest.raises(RuntimeError, match=r"tokenizer\.json is not a tokenizer file: .*again"):
        TextTokenizer.from_file(processor)


def test_ids_that_leave_others_out_are_seen(processor):
    file = processor / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["vocab"]["a"] = 5000
    file.write_text(json.dumps(values))
    tokenizer = TextTokenizer.from_file(processor)
    assert tokenizer.highest_id == 5000
