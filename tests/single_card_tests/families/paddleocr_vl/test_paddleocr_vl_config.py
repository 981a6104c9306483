"""Configurations of PaddleOCR-VL: both dialects, what must be there, and published sizes."""

import json

import paddle
import pytest

from paddle_vl import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration
from paddle_vl.config.families import family_of, model_values
from paddle_vl.families.paddleocr_vl.flops import PaddleOCRVLFlops
from paddle_vl.families.paddleocr_vl.sizes import SIZE_NAMES
from paddle_vl.testing import tiny_paddleocr_vl_config
from tests.support.tiny import GOLDEN

MODELS = GOLDEN / "paddleocr_vl" / "models"
TINY = tiny_paddleocr_vl_config()


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_both_dialects_give_the_same_and_the_flat_one_is_written(kind, tmp_path):
    files = MODELS / kind / "config.json", MODELS / kind / "config.hub_style.json"
    config, hub = map(PaddleOCRVLConfig.from_pretrained, files)
    # Of the tied model one says that it is; the tensors decide.
    assert config.to_dict() == hub.to_dict()
    config.save_pretrained(tmp_path)
    assert PaddleOCRVLConfig.from_pretrained(tmp_path) == hub
    written, published = config.to_dict(), json.loads(files[1].read_text())
    # The code that `auto_map` names is not written.
    for key in ("auto_map", "torch_dtype", "transformers_version"):
        del published[key]
    for key in ("auto_map", "pad_token_id", "torch_dtype"):
        del published["vision_config"][key]
    # The hub's files leave it to the programs.
    for section in (written, written["vision_config"]):
        assert section.pop("initializer_range") == 0.02
    assert written == published


def test_what_transformers_leaves_beside_the_section_is_read(tmp_path):
    values = json.loads((MODELS / "untied" / "config.json").read_text())
    values |= {
        "use_3d_rope": True,
        "compression_ratio": 1.0,
        "auto_map": {},
        "sliding_window": None,
    }
    given = PaddleOCRVLConfig.from_pretrained(MODELS / "untied")
    assert PaddleOCRVLConfig.from_dict(values) == given
    with pytest.raises(ValueError, match="hidden_size is 49, but 48 in text_config: keep the"):
        PaddleOCRVLConfig.from_dict(values | {"hidden_size": 49})


def test_every_size_is_needed():
    values = TINY.to_dict()
    ours = {"pad_token_id", "initializer_range", "tie_word_embeddings"}
    sizes = {name for name, value in values.items() if type(value) is int} - ours
    # As programs have other defaults.
    for name in sorted(sizes - {"ignored_index"}):
        with pytest.raises(ValueError, match=f"{name} is missing"):
            PaddleOCRVLConfig.from_dict({k: v for k, v in values.items() if k != name})
    for name in ("image_size", "num_hidden_layers", "spatial_merge_size"):
        vision = {k: v for k, v in values["vision_config"].items() if k != name}
        with pytest.raises(ValueError, match=f"vision_config: {name} is missing"):
            PaddleOCRVLConfig.from_dict(values | {"vision_config": vision})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_3d_rope": False}, "text_config: use_3d_rope is False; only True"),
        ({"sliding_window": 5}, "sliding_window is 5; only None"),
        ({"rope_scaling": {"mrope_section": [1, 1, 2], "type": "yarn"}}, "rope_type is 'yarn'"),
        (
            {"rope_scaling": {"mrope_section": [1, 1, 2], "mrope_interleaved": True}},
            "mrope_interleaved True; only 'default' and false",
        ),
        ({"rope_scaling": {"mrope_section": [1, 1, 1]}}, r"mrope_section is \[1, 1, 1\]; it must"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple"),
        ({"model_type": "qwen3_vl"}, "model_type is 'qwen3_vl'; 'paddleocr_vl' is needed"),
        ({"image_token_id": 64}, "image_token_id 64 lies outside"),
        ({"window": 4}, r"does not know the keys \['window'\]"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
    ],
)
def test_what_no_model_has_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        PaddleOCRVLConfig.from_dict(TINY.to_dict() | change)


def test_a_tower_unlike_the_published_one_is_refused():
    values = TINY.to_dict()
    for change, message in (
        ({"num_channels": 1}, "vision_config: num_channels is 1; only 3"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; only 0.0"),
        ({"hidden_act": "relu"}, "hidden_act is"),
    ):
        vision = values["vision_config"] | change
        with pytest.raises(ValueError, match=message):
            PaddleOCRVLConfig.from_dict(values | {"vision_config": vision})


@pytest.mark.parametrize("name", [*SIZE_NAMES, "PaddlePaddle/PaddleOCR-VL-1.6"])
def test_published_sizes_are_known_by_name(name):
    config = PaddleOCRVLConfig.named(name)
    assert config.vision_config.table_side == 27
    assert family_of(model_values(name)).name == "PaddleOCR-VL"


def test_the_published_size_has_its_parameters_and_another_is_refused():
    with paddle.LazyGuard():
        model = PaddleOCRVLForConditionalGeneration(PaddleOCRVLConfig.named("paddleocr-vl"))
    assert (model.num_parameters(), len(model.stored_parameters())) == (905_601_648, 608)
    # Multiplications and additions of a patch in the tower, and of a target row in the head.
    grid = {"image_grid_thw": [[1, 2, 2]]}
    forward = PaddleOCRVLFlops(model.config).operations(grid).forward
    assert forward["patches"] == 27 * 2 * (4 * 1152**2 + 2 * 1152 * 4304) + 2 * 588 * 1152
    assert forward["predictions"] == 2 * 1024 * 103424
    with pytest.raises(ValueError, match="'paddleocr-vl-2' is not a size of PaddleOCR-VL"):
        PaddleOCRVLConfig.named("paddleocr-vl-2")
