"""A model is assembled of a Qwen3 and the tower of a Qwen3-VL of another width.

Stages that freeze parts, and that begin with the model of the one before: `test_trainer`.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from assemble_model import assemble
from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from tests.single_card_tests.train.tiny_run import MODEL
from tests.single_card_tests.train.whole_runs import build

MERGERS = ("model.visual.merger.", "model.visual.deepstack_merger_list.")


@pytest.fixture(scope="module")
def parts(run_file, tmp_path_factory):
    """Folders of a Qwen3 of width 16 and of a Qwen3-VL of width 8."""
    folder = tmp_path_factory.mktemp("parts")
    narrow = {name: MODEL[name] | sizes for name, sizes in (
        ("text_config", {"hidden_size": 8}), ("vision_config", {"out_hidden_size": 8}),
    )}  # fmt: skip
    for name, config in (("vision", MODEL | narrow), ("whole", MODEL)):
        settings = [f"model.config={json.dumps(config)}", "train.max_steps=1"]
        build(run_file, folder / name / "out", *settings).run()
    text = Qwen3VLConfig.from_pretrained(folder / "whole/out/final").to_dict()["text_config"]
    values = text | {"model_type": "qwen3", "rope_scaling": None, "use_sliding_window": False}
    (folder / "language").mkdir()
    (folder / "language" / "config.json").write_text(json.dumps(values))
    inner = "model.language_model."
    weights = {
        key.replace(inner, "model."): array
        for key, array in load_file(folder / "whole/out/final/model.safetensors").items()
        if key.startswith(inner)
    }
    save_file(weights, folder / "language" / "model.safetensors")
    return folder / "language", folder / "vision/out/final", inner


@pytest.fixture(scope="module")
def start(parts, tmp_path_factory):
    language, vision, _ = parts
    folder = tmp_path_factory.mktemp("models") / "start"
    assemble(language, vision, folder)
    return folder


def test_an_assembled_model_has_both_parts_and_new_mergers(parts, start):
    language, vision, inner = parts
    found = load_file(start / "model.safetensors")
    text = load_file(language / "model.safetensors")
    for key, array in text.items():
        np.testing.assert_array_equal(found.pop(key.replace("model.", inner, 1)), array)
    tower = load_file(vision / "model.safetensors")
    mergers = {key: found.pop(key) for key in list(found) if key.startswith(MERGERS)}
    assert found
    for key, array in found.items():
        np.testing.assert_array_equal(array, tower[key], err_msg=key)
    assert mergers["model.visual.merger.linear_fc2.weight"].shape[0] == 16
    assert (mergers["model.visual.merger.norm.weight"] == 1).all()
    assert not mergers["model.visual.merger.linear_fc1.bias"].any()
    weights = [array for key, array in mergers.items() if "linear" in key and array.ndim == 2]
    assert all(0.05 < array.std() < 0.2 for array in weights)
    Qwen3VLForConditionalGeneration.from_pretrained(start)


def test_parts_that_do_not_fit_are_refused_before_a_file_is_written(parts, start, tmp_path):
    language, vision, _ = parts
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="'llama'; a dense Qwen3"):
        assemble(tmp_path / "other", vision, tmp_path / "out")
    wide = json.loads((language / "config.json").read_text()) | {"intermediate_size": 48}
    (tmp_path / "other" / "config.json").write_text(json.dumps(wide))
    (tmp_path / "other" / "model.safetensors").symlink_to(language / "model.safetensors")
    with pytest.raises(ValueError, match="has shape .* its config.json makes it"):
        assemble(tmp_path / "other", vision, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="is not empty"):
        assemble(language, vision, start)
