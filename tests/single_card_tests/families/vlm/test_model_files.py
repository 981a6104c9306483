"""Checkpoints of Qwen3-VL and Qwen3.5 in HF's layout."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from paddle_vl import Qwen3_5ForConditionalGeneration, Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.nn.placement import SingleDevicePlacement, StageLayers
from paddle_vl.testing.qwen3_vl import EXPERTS
from tests.support.tiny import GOLDEN, tiny_config, tiny_model

OF_3_5 = GOLDEN / "qwen3_5" / "models"
MODELS = {
    Qwen3VLForConditionalGeneration: GOLDEN / "qwen_vl" / "models",
    Qwen3_5ForConditionalGeneration: OF_3_5,
}
CASES = [(model, kind) for model in MODELS for kind in ("dense_tied", "dense_untied", "moe")]
load_vl = Qwen3VLForConditionalGeneration.from_pretrained
load_3_5 = Qwen3_5ForConditionalGeneration.from_pretrained


def arrays_in(folder: Path) -> dict[str, np.ndarray]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same_arrays(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)


def edit(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    """Change the tensors of a folder's file."""
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "model.safetensors")
    return folder


def turn_experts(arrays: dict[str, np.ndarray]) -> None:
    for key in [key for key in arrays if ".experts." in key and not key.startswith("mtp.")]:
        arrays[key] = np.ascontiguousarray(arrays[key].swapaxes(1, 2))


def divide_experts(arrays: dict[str, np.ndarray]) -> None:
    """As transformers 5.x writes experts of Qwen3.5."""
    for key in [key for key in arrays if ".experts." in key]:
        outer, _, name = key.rpartition(".")
        parts = ["gate_proj", "up_proj"] if name == "gate_up_proj" else [name]
        for number, matrix in enumerate(arrays.pop(key)):
            for part, half in zip(parts, np.split(matrix, len(parts)), strict=True):
                arrays[f"{outer}.{number}.{part}.weight"] = half.copy()


@pytest.fixture
def moe_3_5(tmp_path) -> Path:
    return Path(shutil.copytree(OF_3_5 / "moe", tmp_path / "moe"))


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_loading_gives_the_files_own_arrays_under_its_keys(model, kind):
    folder = MODELS[model] / kind
    stored = load_file(folder / "model.safetensors")
    shapes = json.loads((folder / "keys.json").read_text())
    assert {key: list(array.shape) for key, array in stored.items()} == shapes
    stored = {key: array for key, array in stored.items() if not key.startswith("mtp.")}
    assert_same_arrays(model.from_pretrained(folder).hf_state_dict(), stored)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000], ids=["single", "sharded"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_saving_and_loading_gives_the_same_bits(tmp_path, max_shard_bytes, tied):
    model = Qwen3VLForConditionalGeneration.from_config(tiny_config().with_tie(tied))
    # A smaller save removes the shards of a larger one.
    model.save_pretrained(tmp_path, max_shard_bytes=20_000)
    model.save_pretrained(tmp_path, max_shard_bytes=max_shard_bytes)
    loaded, wanted = load_vl(tmp_path), model.hf_state_dict()
    assert loaded.config.tie_word_embeddings == tied
    assert len(loaded.parameters()) == len(model.parameters())
    assert_same_arrays(loaded.hf_state_dict(), wanted)
    if max_shard_bytes == 10**9:
        assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in wanted.values())
    assert index["weight_map"].keys() == wanted.keys()
    for key, name in index["weight_map"].items():
        with safe_open(tmp_path / name, framework="np") as file:
            np.testing.assert_array_equal(file.get_tensor(key), wanted[key])


@pytest.mark.parametrize("max_shard_bytes", [10**9, 200_000], ids=["single", "sharded"])
def test_prediction_layers_are_written_as_they_were(moe_3_5, tmp_path, max_shard_bytes):
    wanted = load_file(moe_3_5 / "model.safetensors")
    assert any(key.startswith("mtp.") for key in wanted)
    model = load_3_5(moe_3_5)
    # A checkpoint that training rotates out.
    shutil.rmtree(moe_3_5)
    model.save_pretrained(tmp_path / "saved", max_shard_bytes=max_shard_bytes)
    assert_same_arrays(arrays_in(tmp_path / "saved"), wanted)
    again = load_3_5(tmp_path / "saved")
    assert [tensor.name for tensor in again.kept] == [tensor.name for tensor in model.kept]


def test_the_first_pipeline_stage_keeps_the_prediction_layers():
    stages = StageLayers(True, frozenset({0, 1}), False), StageLayers(False, frozenset({2}), True)
    kept = [load_3_5(OF_3_5 / "moe", placement=SingleDevicePlacement(each)).kept for each in stages]
    assert len(kept[0]) > 0 == len(kept[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
@pytest.mark.parametrize("of_file", ["F32", "BF16"])
def test_rates_of_decay_and_gated_norms_have_the_dtype_of_the_file(of_file, dtype, tmp_path):
    """Float32 in the bfloat16 files of Qwen3.5, bfloat16 in those of 3.6."""
    model = load_3_5(OF_3_5 / "moe", "bfloat16" if of_file == "F32" else "float32")
    if of_file == "BF16":
        model.to(dtype="bfloat16")
    model.save_pretrained(tmp_path / "file")
    stored = read_checkpoint_headers(tmp_path / "file")
    endings = (".linear_attn.A_log", ".linear_attn.norm.weight")
    own = {key: tensor for key, tensor in stored.items() if not key.startswith("mtp.")}
    for key, tensor in own.items():
        assert tensor.dtype == (of_file if key.endswith(endings) else "BF16"), key
    assert sum(key.endswith(endings) for key in own) == 2 * 3
    load_3_5(tmp_path / "file", dtype).save_pretrained(tmp_path / "again")
    wanted, found = (
        (tmp_path / folder / "model.safetensors").read_bytes() for folder in ("file", "again")
    )
    assert found == wanted


# Width 16: no matrix is square, then gate and up are, then down is.
@pytest.mark.parametrize("inner", [6, 8, 16])
def test_experts_load_from_either_layout_and_are_written_in_the_hubs(inner, tmp_path):
    model = tiny_model(**EXPERTS | {"moe_intermediate_size": inner})
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    keys = sorted(key for key in stored if ".experts." in key)
    assert [stored[key].shape for key in keys[:2]] == [(6, inner, 16), (6, 16, 2 * inner)]
    for change in (lambda _: None, turn_experts):
        found = load_vl(edit(tmp_path, change)).hf_state_dict()
        assert_same_arrays(found, model.hf_state_dict())


def test_a_tensor_per_expert_gives_the_same_model(moe_3_5):
    stored = load_file(edit(moe_3_5, divide_experts) / "model.safetensors")
    listed = json.loads((moe_3_5 / "expert_keys_as_transformers_saves.json").read_text())
    assert set(listed) <= set(stored)
    assert_same_arrays(load_3_5(moe_3_5).hf_state_dict(), load_3_5(OF_3_5 / "moe").hf_state_dict())


EXPERT = "model.language_model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (divide_experts(a), a.pop(f"{EXPERT}.3.up_proj.weight")),
         "missing: .*layers.1.mlp.experts.gate_up_proj"),
        (turn_experts, "misshapen: .*experts.down_proj"),
        (lambda a: a.update({f"{EXPERT}.down_proj": a[f"{EXPERT}.down_proj"][:, :5].copy()}),
         r"1 misshapen: .*down_proj \(file \["),
    ],
)  # fmt: skip
def test_experts_that_do_not_fit_are_named(moe_3_5, change, message):
    with pytest.raises(ValueError, match=message):
        load_3_5(edit(moe_3_5, change))


@pytest.mark.parametrize(
    ("flags", "has_head", "tied"),
    [((True, True), False, True), ((False, False), True, False),
     ((True, False), True, False), ((False, True), False, True), ((None, True), True, False),
     ((True, None), False, True)],
)  # fmt: skip
def test_tie_flags_decide_together_and_the_checkpoint_when_they_do_not(
    flags, has_head, tied, tmp_path, caplog
):
    tiny_model().save_pretrained(tmp_path)
    values = tiny_config().to_dict()
    for target, flag in zip((values, values["text_config"]), flags, strict=True):
        target.pop("tie_word_embeddings")
        if flag is not None:
            target["tie_word_embeddings"] = flag
    (tmp_path / "config.json").write_text(json.dumps(values))
    if not has_head:
        edit(tmp_path, lambda arrays: arrays.pop("lm_head.weight"))
    with caplog.at_level(logging.INFO, logger="paddle_vl"):
        model = load_vl(tmp_path)
    assert model.config.tie_word_embeddings == tied
    assert ("lm_head.weight" in model.hf_state_dict()) != tied
    assert ("flags disagree" in caplog.text) == (flags[0] != flags[1])


def test_missing_unexpected_and_misshapen_keys_are_named_all_at_once(tmp_path):
    tiny_model().save_pretrained(tmp_path)

    def spoil(arrays: dict) -> None:
        del arrays["lm_head.weight"], arrays["model.visual.pos_embed.weight"]
        arrays["model.visual.extra.weight_scale_inv"] = np.zeros((2, 2), np.float32)
        arrays["model.language_model.norm.weight"] = np.ones(15, np.float32)

    with pytest.raises(ValueError, match="does not fit the model") as error:
        load_vl(edit(tmp_path, spoil))
    for told in (
        "2 missing: lm_head.weight, model.visual.pos_embed.weight",
        "1 unexpected: model.visual.extra.weight_scale_inv",
        "load the model that they were made from",
        "1 misshapen: model.language_model.norm.weight (file [15], model [16])",
    ):
        assert told in str(error.value)


def test_bfloat16_weights_are_read_and_written(tmp_path):
    model = tiny_model()
    for parameter in model.parameters():
        rounded = parameter.numpy().view(np.uint32) & np.uint32(0xFFFF0000)
        parameter.set_value(rounded.view(np.float32))
    wanted = model.hf_state_dict()
    model.to(dtype="bfloat16")
    model.save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in read_checkpoint_headers(tmp_path).values()} == {"BF16"}
    assert_same_arrays(load_vl(tmp_path).hf_state_dict(), wanted)
    narrow = load_vl(tmp_path, dtype="bfloat16")
    assert {parameter.dtype for parameter in narrow.parameters()} == {paddle.bfloat16}


def test_a_truncated_file_a_missing_shard_and_an_empty_folder_are_refused_by_name(tmp_path):
    model, file = tiny_model(), tmp_path / "model.safetensors"
    model.save_pretrained(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RuntimeError, match=r"model\.safetensors is not a complete.*again"):
        load_vl(tmp_path)
    model.save_pretrained(tmp_path, max_shard_bytes=20_000)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(RuntimeError, match=shard.name):
        load_vl(tmp_path)
    for file in tmp_path.glob("model*"):
        file.unlink()
    with pytest.raises(RuntimeError, match="neither model.safetensors nor"):
        load_vl(tmp_path)


_MEMORY_PROBE = """
import sys
import paddle
from paddle_vl import Qwen3VLForConditionalGeneration
# All that loading imports, so that modules do not count.
import paddle_vl.families.vlm.training.adapter

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

paddle.matmul(paddle.ones([64, 64]), paddle.ones([64, 64]))
before = peak()
model = Qwen3VLForConditionalGeneration.from_pretrained(sys.argv[1])
print(peak() - before)
"""


def test_loading_needs_no_more_than_the_model_and_its_largest_tensor(tmp_path):
    # The 6 MB matrices of 8 layers sum to more than the largest tensor, 40 MB.
    config = tiny_config(
        vocab_size=160_000, hidden_size=64, intermediate_size=24_000, num_hidden_layers=8
    )
    model = Qwen3VLForConditionalGeneration.from_config(config)
    model.save_pretrained(tmp_path)
    sizes = [array.nbytes for array in model.hf_state_dict().values()]
    del model
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY_PROBE, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    slack = 16 << 20
    assert sum(sizes) * 0.9 < int(done.stdout.split()[-1]) <= sum(sizes) + max(sizes) + slack
