"""Images and videos to patches, grids and timestamps, and the settings in HF's files.

Sizes, pixels and samplings are those of transformers in the golden case `processor`."""

import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.video_reader import FrameFiles, VideoFrames
from paddle_vl.families.vlm.inputs.image_processor import ImageProcessor, smart_resize
from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer
from paddle_vl.families.vlm.inputs.video_processor import VideoProcessor
from paddle_vl.families.vlm.templates.encoding import timestamp_text
from tests.single_card_tests.data.video_files import decode_all, moving_frames, write_video
from tests.single_card_tests.families.qwen3_vl.chat_builders import random_image
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.tiny import GOLDEN

TABLES = json.loads((GOLDEN / "qwen_vl" / "processor" / "processor.json").read_text())
HALF = [0.5, 0.5, 0.5]
PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "image_mean": HALF,
           "image_std": HALF}  # fmt: skip
SETTINGS = {"size": {"shortest_edge": 64, "longest_edge": 12288}, **PATCHES}
IMAGES = ImageProcessor.from_dict(SETTINGS)
NAN = float("nan")


def processor(**settings) -> VideoProcessor:
    return VideoProcessor.from_dict({**SETTINGS, **settings})


# Images.


@pytest.mark.parametrize(("height", "width"), [(1, 201), (4020, 20)])
def test_extreme_aspect_ratios_are_refused_naming_the_size(height, width):
    with pytest.raises(BadSampleError, match=f"{width} x {height} pixels.*200 times"):
        smart_resize(height, width, 32, 4096, 12288)
    assert smart_resize(1, 200, 32, 4096, 12288) == (32, 928)


def test_channels_are_normalised_with_their_own_mean_and_std():
    settings = {**SETTINGS, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 0.125]}
    image = np.full((8, 8, 3), (51, 102, 153), dtype=np.uint8)
    values = ImageProcessor.from_dict(settings)([image])["pixel_values"].reshape(4, 3, 32)
    expected = (np.array([0.2, 0.4, 0.6]) - settings["image_mean"]) / settings["image_std"]
    np.testing.assert_allclose(values, np.broadcast_to(expected[:, None], (4, 3, 32)), rtol=1e-6)


def test_settings_of_images_in_all_dialects(tmp_path):
    """`min_pixels` and `max_pixels` win over `size`, as in HF."""
    rest = {key: value for key, value in SETTINGS.items() if key != "size"}
    limits = {"min_pixels": 64, "max_pixels": 12288}
    assert ImageProcessor.from_dict(rest | limits) == IMAGES
    assert ImageProcessor.from_dict(SETTINGS | {"min_pixels": 16}).min_pixels == 16
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": SETTINGS}))
    assert ImageProcessor.from_pretrained(tmp_path) == IMAGES
    hub = {**TABLES["hub_preprocessor_config"], "image_processor_type": "Qwen2VLImageProcessor"}
    of_hub = ImageProcessor.from_dict(hub)
    of_hub.save_pretrained(tmp_path / "hub")
    assert ImageProcessor.from_pretrained(tmp_path / "hub") == of_hub
    found = ImageProcessor.from_pretrained(tmp_path / "hub", max_pixels=99999)
    assert (found.min_pixels, found.max_pixels) == (65536, 99999)
    written = json.loads((tmp_path / "hub" / "preprocessor_config.json").read_text())
    # For engines that know the older names of the limits only.
    older = {"min_pixels": 65536, "max_pixels": 16777216, "processor_class": "Qwen3VLProcessor"}
    assert written == hub | older
    with pytest.raises(ValueError, match=r"size\.longest_edge.*patch_size.*image_mean"):
        ImageProcessor.from_dict({"size": {"shortest_edge": 4096}, "merge_size": 2})


def test_files_arrays_and_pil_images_give_the_same_pixels_upright(tmp_path):
    image = random_image(16, 24)
    exif = Image.Exif()
    exif[274] = 6  # the viewer has to turn it by 90 degrees clockwise
    image.save(tmp_path / "a.png")
    Image.fromarray(np.rot90(np.asarray(image))).save(tmp_path / "turned.png", exif=exif)
    expected = IMAGES([np.asarray(image)])["pixel_values"]
    for source in (tmp_path / "a.png", str(tmp_path / "a.png"), image, tmp_path / "turned.png"):
        np.testing.assert_array_equal(IMAGES([source])["pixel_values"], expected)


def test_images_that_cannot_be_taken_are_told(tmp_path):
    with pytest.raises(BadSampleError, match=r"image 2 .*gone\.png") as info:
        IMAGES([random_image(8, 8), tmp_path / "gone.png"])
    assert info.value.kind == "missing_image"
    whole = ImageProcessor.from_dict({**SETTINGS, "do_resize": False})
    with pytest.raises(ValueError, match="12 x 16 pixels"):
        whole([random_image(16, 12)])


# Videos.


def test_sampled_frames_of_a_file_become_patches_with_times(tmp_path):
    """25 frames at 10 fps last 2.5 s and give 5 frames at 2 fps; 5 is odd, so the last repeats."""
    path = write_video(tmp_path / "a.mp4", 25, fps=10)
    found = processor()([path])
    # 5 frames count as 4 of 32 x 48 pixels (round half to even), which fits the budget without
    # resizing.
    assert found.arrays["video_grid_thw"].tolist() == [[3, 8, 12]]
    assert found.timestamps == [[0.3, 1.5, 2.4]]
    taken = decode_all(path)[[0, 6, 12, 18, 24, 24]]
    values = found.arrays["pixel_values_videos"].reshape(3, 4, 6, 2, 2, 3, 2, 4, 4)
    pixels = values.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(6, 32, 48, 3)
    np.testing.assert_allclose(pixels, taken / 127.5 - 1, atol=1e-6)


def test_file_and_its_frames_in_memory_give_the_same(tmp_path):
    path = write_video(tmp_path / "a.mkv", 31, fps=15)
    from_file = processor()([path])
    from_frames = processor()([VideoFrames(decode_all(path), 15.0)])
    assert from_file.timestamps == from_frames.timestamps
    for key, value in from_file.arrays.items():
        np.testing.assert_array_equal(from_frames.arrays[key], value)


def pictures(count: int) -> FrameFiles:
    """Pictures of 8 x 8 pixels, of which each is one grey."""
    files = []
    for number in range(count):
        Image.new("L", (8, 8), number % 256).save(file := io.BytesIO(), "png")
        files.append(file.getvalue())
    return FrameFiles(tuple(files))


@pytest.mark.parametrize(("fps", "count", "texts"), [
    (2, 8, "0.2 1.2 2.2 3.2"),
    (1, 8, "0.5 2.5 4.5 6.5"),
    (4, 8, "0.1 0.6 1.1 1.6"),
    (2, 5, "0.2 1.2 2.0"),
    (2, 1, "0.0"),
])  # fmt: skip
def test_of_a_list_of_frames_all_are_taken_at_the_rate_of_the_run(fps, count, texts):
    """As ms-swift 4.6 (qwen-vl-utils 0.0.14) and LLaMA-Factory 0.9.5, which differ in the time of
    an odd last frame: 2.0 is LLaMA-Factory's and that of transformers 5.24, ms-swift has 2.2."""
    found = processor(fps=fps, min_frames=2, max_frames=4)([pictures(count)])
    (times,) = found.timestamps
    assert [timestamp_text(time) for time in times] == [f"<{t} seconds>" for t in texts.split()]
    patches = found.arrays["pixel_values_videos"].reshape(len(times), 4, 3, 2, -1)
    greys = (patches[:, 0, 0, :, 0].ravel() + 1) * 127.5
    assert greys.round().tolist() == [min(each, count - 1) for each in range(2 * len(times))]


def test_long_lists_of_frames_are_not_thinned_and_their_own_rate_wins():
    many = processor()([pictures(1000)], with_pixels=False)
    assert many.arrays["video_grid_thw"].tolist() == [[500, 2, 2]]
    own = FrameFiles(pictures(4).files, fps=1)
    assert processor()([own]).timestamps == [[0.5, 2.5]]
    with pytest.raises(BadSampleError, match="has 0 frame"):
        processor()([FrameFiles(())])


@pytest.mark.parametrize(
    ("settings", "num_patches", "first"),
    [
        ({}, 3, 0.25),
        ({"fps": 4.0}, 5, 0.1),
        ({"max_frames": 4}, 2, 0.4),
        ({"fps": 0.5}, 2, 0.4),
        ({"fps": 0.5, "min_frames": 2}, 1, 1.2),
    ],
)
def test_each_sampling_setting_acts(settings, num_patches, first):
    (times,) = processor(**settings)([VideoFrames(moving_frames(25), 10.0)]).timestamps
    assert len(times) == num_patches
    assert times[0] == pytest.approx(first, abs=0.06)


def test_bad_video_is_told_by_number_and_file(tmp_path):
    good, bad = VideoFrames(moving_frames(4), 2.0), tmp_path / "gone.mp4"
    with pytest.raises(BadSampleError, match=r"video 2 \(.*gone\.mp4\): there is no file"):
        processor()([good, bad])
    with pytest.raises(BadSampleError, match=r"^video 1: the video has 1 frame"):
        processor()([VideoFrames(moving_frames(1), 2.0)])
    thin = VideoFrames(moving_frames(4, 8, 4000), 2.0)
    with pytest.raises(BadSampleError, match="may be at most 200 times"):
        processor()([thin])


def test_settings_are_those_of_hf_files(tmp_path):
    """Published checkpoints state no sampling; it is in HF's class."""
    config = {**SETTINGS, "video_processor_type": "Qwen3VLVideoProcessor", "own": 1}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(config))
    found = VideoProcessor.from_pretrained(tmp_path, IMAGES)
    assert (found.fps, found.min_frames, found.max_frames) == (2, 4, 768)
    assert (found.min_pixels, found.max_pixels) == (64, 12288)
    found.save_pretrained(tmp_path / "copy")
    again = json.loads((tmp_path / "copy" / "video_preprocessor_config.json").read_text())
    assert again == {
        **config, "processor_class": "Qwen3VLProcessor", "fps": 2.0, "min_frames": 4,
        "max_frames": 768,
    }  # fmt: skip
    assert VideoProcessor.from_pretrained(tmp_path / "copy", IMAGES) == found


def test_folder_about_images_only_has_the_published_budget_and_the_patches_of_its_images(tmp_path):
    found = VideoProcessor.from_pretrained(tmp_path, IMAGES)
    assert found == processor(size={"shortest_edge": 4096, "longest_edge": 25165824})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": None}, "lacks size.shortest_edge"),
        ({"do_sample_frames": False}, "do_sample_frames = False"),
        ({"do_resize": False}, "do_resize = False"),
        ({"num_frames": 8}, "num_frames = 8"),
        ({"cap_pixels_per_frame": True}, "cap_pixels_per_frame = True"),
        ({"min_frames": 1}, "min_frames 1 and max_frames 768: 2 <= min_frames"),
        ({"min_frames": 8, "max_frames": 4}, "min_frames 8 and max_frames 4"),
        ({"video_markers": "outer"}, "video_markers.*'inner' or 'both'"),
        ({"size": {"shortest_edge": 9, "longest_edge": 4}}, "min_pixels 9 and max_pixels 4"),
    ],
)
def test_setting_that_cannot_be_honoured_is_refused_by_name(tmp_path, settings, message):
    file = tmp_path / "video_preprocessor_config.json"
    file.write_text(json.dumps({**SETTINGS, **settings}))
    with pytest.raises(ValueError, match=f"{file}.*{message}"):
        VideoProcessor.from_pretrained(tmp_path, IMAGES)


# Damaged files.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_tiny_run(tmp_path_factory.mktemp("run")).with_name("processor")


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "processor")


def change(file, name, value):
    values = json.loads(file.read_text())
    if isinstance(value, type) and value is KeyError:
        del values[name]
    else:
        values[name] = value
    file.write_text(json.dumps(values))


BAD_SETTINGS = [
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


@pytest.mark.parametrize(("name", "value"), BAD_SETTINGS)
def test_settings_of_images_and_videos_are_refused_by_name(folder, name, value):
    images = ImageProcessor.from_pretrained(folder)
    for file, read in (
        ("preprocessor_config.json", ImageProcessor.from_pretrained),
        (
            "video_preprocessor_config.json",
            lambda path: VideoProcessor.from_pretrained(path, images),
        ),
    ):
        change(folder / file, name, value)
        with pytest.raises(ValueError, match=rf"/{file}.*{name}"):
            read(folder)


def test_token_that_every_image_is_enlarged_to_beyond_sense_is_refused(folder):
    file = folder / "preprocessor_config.json"
    change(file, "patch_size", 256)
    change(file, "merge_size", 32)
    with pytest.raises(
        ValueError, match=r"patch_size 256, merge_size 32 and temporal_patch_size 2"
    ):
        ImageProcessor.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("fps", 0), ("fps", -2), ("fps", NAN), ("fps", "2"), ("fps", 10**9), ("min_frames", 2.5),
     ("max_frames", 10**12), ("min_frames", True)],
)  # fmt: skip
def test_settings_of_frames_are_refused_by_name(folder, name, value):
    file = folder / "video_preprocessor_config.json"
    change(file, name, value)
    with pytest.raises(ValueError, match=rf"/{file.name}.*{name}"):
        VideoProcessor.from_pretrained(folder, ImageProcessor.from_pretrained(folder))


def test_ids_that_leave_others_out_are_seen_and_faults_of_the_library_told(folder):
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["vocab"]["a"] = 5000
    file.write_text(json.dumps(values))
    tokenizer = TextTokenizer.from_file(folder)
    assert tokenizer.highest_id == 5000
    change(file, "model", {"type": "BPE"})
    with pytest.raises(RuntimeError, match=r"tokenizer\.json is not a tokenizer file: .*again"):
        TextTokenizer.from_file(folder)
