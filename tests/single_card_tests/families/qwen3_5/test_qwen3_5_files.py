"""Checkpoints of Qwen3.5 in all layouts.

Guarantees: files hold HF's keys and values; stacked experts and a tensor per expert give the same
model; a transposed stack is refused; tensors of multi-token prediction are written again as they
were, also after their file is gone and from several pipeline stages' point of view; nothing of a
decoder alone is taken for a model; in bfloat16 the rates of decay and the gated norms keep the
dtype of the file.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddle_vl import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.nn.placement import SingleDevicePlacement, StageLayers
from tests.support.tiny import GOLDEN

MODELS = GOLDEN / "qwen3_5" / "models"
KINDS = ["dense_tied", "dense_untied", "moe"]


@pytest.mark.parametrize("kind", KINDS)
def test_loading_gives_the_files_own_arrays_under_its_keys(kind):
    found = Qwen3_5MoeForConditionalGeneration.from_pretrained(MODELS / kind).hf_state_dict()
    stored = load_file(MODELS / kind / "model.safetensors")
    stored = {key: array for key, array in stored.items() if not key.startswith("mtp.")}
    assert found.keys() == stored.keys()
    for key, array in found.items():
        np.testing.assert_array_equal(array, stored[key], err_msg=key)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 200_000], ids=["single", "sharded"])
def test_what_is_saved_is_what_was_loaded_with_the_prediction_layers(tmp_path, max_shard_bytes):
    source = Path(shutil.copytree(MODELS / "moe", tmp_path / "source"))
    wanted = load_file(source / "model.safetensors")
    assert any(key.startswith("mtp.") for key in wanted)
    model = Qwen3_5ForConditionalGeneration.from_pretrained(source)
    # A checkpoint that training rotates out.
    shutil.rmtree(source)
    model.save_pretrained(tmp_path / "saved", max_shard_bytes=max_shard_bytes)
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_bytes < 10**9)
    found = {key: array for file in files for key, array in load_file(file).items()}
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
    again = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "saved")
    assert [tensor.name for tensor in again.kept] == [tensor.name for tensor in model.kept]


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
@pytest.mark.parametrize("of_file", ["F32", "BF16"])
def test_rates_of_decay_and_gated_norms_have_the_dtype_of_the_file(of_file, dtype, tmp_path):
    """Float32 in the bfloat16 files of Qwen3.5, bfloat16 in those of 3.6."""
    if of_file == "F32":
        model = Qwen3_5ForConditionalGeneration.from_pretrained(MODELS / "moe", "bfloat16")
    else:
        model = Qwen3_5ForConditionalGeneration.from_pretrained(MODELS / "moe")
        model.to(dtype="bfloat16")
    model.save_pretrained(tmp_path / "file")
    stored = read_checkpoint_headers(tmp_path / "file")
    endings = (".linear_attn.A_log", ".linear_attn.norm.weight")
    own = {key: tensor for key, tensor in stored.items() if not key.startswith("mtp.")}
    for key, tensor in own.items():
        assert tensor.dtype == (of_file if key.endswith(endings) else "BF16"), key
    assert sum(key.endswith(endings) for key in own) == 2 * 3
    again = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "file", dtype)
    again.save_pretrained(tmp_path / "again")
    wanted, found = (
        (tmp_path / folder / "model.safetensors").read_bytes() for folder in ("file", "again")
    )
    assert found == wanted


def test_the_first_pipeline_stage_keeps_the_prediction_layers():
    placements = [
        SingleDevicePlacement(StageLayers(True, frozenset({0, 1}), False)),
        SingleDevicePlacement(StageLayers(False, frozenset({2, 3}), True)),
    ]
    kept = [
        len(Qwen3_5ForConditionalGeneration.from_pretrained(MODELS / "moe", placement=each).kept)
        for each in placements
    ]
    assert kept[0] > 0 == kept[1]


def per_expert(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As transformers 5.x writes experts."""
    made = {}
    for key, array in stored.items():
        outer, _, name = key.rpartition(".experts.")
        if name == "gate_up_proj":
            for number, matrix in enumerate(array):
                gate, up = np.split(matrix, 2)
                made[f"{outer}.experts.{number}.gate_proj.weight"] = gate.copy()
                made[f"{outer}.experts.{number}.up_proj.weight"] = up.copy()
        elif name == "down_proj":
            for number, matrix in enumerate(array):
                made[f"{outer}.experts.{number}.down_proj.weight"] = matrix.copy()
        else:
            made[key] = array
    return made


def test_a_tensor_per_expert_gives_the_same_model(tmp_path):
    folder = Path(shutil.copytree(MODELS / "moe", tmp_path / "moe"))
    stored = per_expert(load_file(folder / "model.safetensors"))
    listed = json.loads((folder / "expert_keys_as_transformers_saves.json").read_text())
    assert set(listed) <= set(stored)
    save_file(stored, folder / "model.safetensors")
    wanted = Qwen3_5ForConditionalGeneration.from_pretrained(MODELS / "moe").hf_state_dict()
    found = Qwen3_5ForConditionalGeneration.from_pretrained(folder).hf_state_dict()
    for key, array in wanted.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
    key = "model.language_model.layers.1.mlp.experts.3.up_proj.weight"
    del stored[key]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ValueError, match="missing: .*layers.1.mlp.experts.gate_up_proj"):
        Qwen3_5ForConditionalGeneration.from_pretrained(folder)


def test_transposed_experts_are_refused(tmp_path):
    folder = Path(shutil.copytree(MODELS / "moe", tmp_path / "moe"))
    stored = load_file(folder / "model.safetensors")
    for key in stored:
        if ".experts." in key and not key.startswith("mtp."):
            stored[key] = np.ascontiguousarray(stored[key].swapaxes(1, 2))
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ValueError, match="misshapen: .*experts.down_proj"):
        Qwen3_5ForConditionalGeneration.from_pretrained(folder)
