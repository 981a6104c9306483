"""Image processor: sizes, pixels and settings equal HF's PIL backend.

Guarantees: every row of the golden size table; bit-exact pixel values, with resizing and without;
the order of images; both dialects of the pixel budget; every setting is read and none is ignored;
unusable images are refused with number, file and reason.

The oracle is the output of transformers 5.23.0 (tests/golden/qwen_vl/processor).
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.inputs.image_processor import ImageProcessor, smart_resize

GOLDEN = Path(__file__).parents[3] / "golden" / "qwen_vl" / "processor"
TABLES = json.loads((GOLDEN / "processor.json").read_text())
SETTINGS = TABLES["image"]["config"]


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "processor.safetensors")


@pytest.mark.parametrize(("height", "width"), [(1, 201), (4020, 20)])
def test_smart_resize_refuses_extreme_aspect_ratio_naming_the_size(height, width):
    with pytest.raises(BadSampleError, match=f"{width} x {height} pixels.*200 times"):
        smart_resize(height, width, 32, 4096, 12288)


def test_smart_resize_takes_a_ratio_of_exactly_200():
    assert smart_resize(1, 200, 32, 4096, 12288) == (32, 928)


def test_channels_are_normalised_with_their_own_mean_and_std():
    settings = {**SETTINGS, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 0.125]}
    image = np.full((64, 64, 3), (51, 102, 153), dtype=np.uint8)
    values = ImageProcessor.from_dict(settings)([image])["pixel_values"].reshape(16, 3, 512)
    expected = (np.array([0.2, 0.4, 0.6]) - settings["image_mean"]) / settings["image_std"]
    np.testing.assert_allclose(values, np.broadcast_to(expected[:, None], (16, 3, 512)), rtol=1e-6)


def test_image_that_blocks_do_not_tile_is_refused_without_resizing():
    processor = ImageProcessor.from_dict({**SETTINGS, "do_resize": False})
    with pytest.raises(ValueError, match="48 x 64 pixels"):
        processor([np.zeros((64, 48, 3), dtype=np.uint8)])


def test_both_dialects_of_the_pixel_budget_are_read():
    without_size = {key: value for key, value in SETTINGS.items() if key != "size"}
    other = ImageProcessor.from_dict({**without_size, "min_pixels": 4096, "max_pixels": 12288})
    assert other == ImageProcessor.from_dict(SETTINGS)


def test_min_and_max_pixels_win_over_size_as_in_hf():
    processor = ImageProcessor.from_dict({**SETTINGS, "min_pixels": 1024, "max_pixels": 2048})
    assert (processor.min_pixels, processor.max_pixels) == (1024, 2048)


def test_every_missing_setting_is_named():
    with pytest.raises(ValueError, match=r"size\.longest_edge.*patch_size.*image_mean"):
        ImageProcessor.from_dict({"size": {"shortest_edge": 4096}, "merge_size": 2})


def test_settings_survive_saving_and_loading(tmp_path):
    hub = {**TABLES["hub_preprocessor_config"], "image_processor_type": "Qwen2VLImageProcessor"}
    processor = ImageProcessor.from_dict(hub)
    processor.save_pretrained(tmp_path)
    assert ImageProcessor.from_pretrained(tmp_path) == processor
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    # For engines that know the older names of the limits only.
    limits = {"min_pixels": 65536, "max_pixels": 16777216}
    assert written == {**hub, **limits, "processor_class": "Qwen3VLProcessor"}


def test_pixel_budget_can_be_replaced_on_loading(tmp_path):
    ImageProcessor.from_dict(SETTINGS).save_pretrained(tmp_path)
    processor = ImageProcessor.from_pretrained(tmp_path, max_pixels=8192)
    assert (processor.min_pixels, processor.max_pixels) == (4096, 8192)


def test_settings_nested_by_transformers_5_are_read(tmp_path):
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": SETTINGS}))
    assert ImageProcessor.from_pretrained(tmp_path) == ImageProcessor.from_dict(SETTINGS)


def test_checkpoint_without_settings_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"preprocessor_config\.json"):
        ImageProcessor.from_pretrained(tmp_path)


def test_files_arrays_and_pil_images_give_the_same_pixels(tmp_path, golden):
    array = golden["image.0.rgb_uint8"]
    path = tmp_path / "a.png"
    Image.fromarray(array).save(path)
    processor = ImageProcessor.from_dict(SETTINGS)
    expected = processor([array])["pixel_values"]
    for source in (path, str(path), Image.fromarray(array)):
        np.testing.assert_array_equal(processor([source])["pixel_values"], expected)


def test_image_is_turned_upright_by_its_exif_orientation(tmp_path, golden):
    array = golden["image.1.rgb_uint8"]
    exif = Image.Exif()
    exif[274] = 6  # the viewer has to turn it by 90 degrees clockwise
    Image.fromarray(np.rot90(array)).save(tmp_path / "turned.png", exif=exif)
    processor = ImageProcessor.from_dict(SETTINGS)
    np.testing.assert_array_equal(
        processor([tmp_path / "turned.png"])["pixel_values"], processor([array])["pixel_values"]
    )


def test_missing_image_is_refused_with_number_and_path(tmp_path, golden):
    processor = ImageProcessor.from_dict(SETTINGS)
    with pytest.raises(BadSampleError, match=r"image 2 .*gone\.png") as info:
        processor([golden["image.0.rgb_uint8"], tmp_path / "gone.png"])
    assert info.value.kind == "missing_image"
