"""Checkpoints in HF's layout.

Guarantees: saving and loading is bit-exact, sharded or not; the safetensors library opens the files
with HF's keys and shapes; both configuration dialects; the tie flag; one error lists every missing,
unexpected and misshapen key; damaged files are refused; loading has bounded memory.
"""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.safetensors_io import read_header
from tests.support.tiny import GOLDEN, tiny_config, tiny_model

MODELS = GOLDEN / "qwen_vl" / "models"


def state(model) -> dict[str, np.ndarray]:
    return model.hf_state_dict()


@pytest.fixture
def golden_copy(tmp_path):
    def copy(kind: str) -> Path:
        return Path(shutil.copytree(MODELS / kind, tmp_path / kind))

    return copy


@pytest.mark.parametrize("kind", ["dense_untied", "dense_tied"])
def test_loading_gives_the_files_own_arrays_under_its_keys(kind):
    found = state(Qwen3VLForConditionalGeneration.from_pretrained(MODELS / kind))
    stored = load_file(MODELS / kind / "model.safetensors")
    shapes = json.loads((MODELS / kind / "keys.json").read_text())
    assert {key: list(array.shape) for key, array in found.items()} == shapes
    for key, array in found.items():
        np.testing.assert_array_equal(array, stored[key])


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000], ids=["single", "sharded"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_saving_and_loading_gives_the_same_bits(tmp_path, max_shard_bytes, tied):
    model = tiny_model()
    if tied:
        model = Qwen3VLForConditionalGeneration.from_config(tiny_config().with_tie(True))
    model.save_pretrained(tmp_path, max_shard_bytes=max_shard_bytes)
    sharded = max_shard_bytes < 10**9
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or sharded
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.config.tie_word_embeddings == tied
    assert len(loaded.parameters()) == len(model.parameters())
    for key, array in state(model).items():
        np.testing.assert_array_equal(state(loaded)[key], array)


def test_files_open_with_the_safetensors_library(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    wanted, seen = state(model), set()
    for name in set(index["weight_map"].values()):
        with safe_open(tmp_path / name, framework="np") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                seen.add(key)
                assert index["weight_map"][key] == name
                np.testing.assert_array_equal(file.get_tensor(key), wanted[key])
    assert seen == set(wanted)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in wanted.values())


def test_a_smaller_save_removes_the_shards_of_a_larger_one(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_bytes=20_000)
    model.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("kind", ["dense_untied", "dense_tied", "moe"])
def test_both_dialects_give_the_same_configuration_and_the_hubs_is_written(kind, tmp_path):
    new = Qwen3VLConfig.from_pretrained(MODELS / kind / "config.json")
    hub = Qwen3VLConfig.from_pretrained(MODELS / kind / "config.hub_style.json")
    assert new == hub
    hub.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    published = json.loads((MODELS / kind / "config.hub_style.json").read_text())
    for key in ("model_type", "architectures"):
        assert written[key] == published[key]
    for part in ("text_config", "vision_config"):
        for key in set(published[part]) & set(written[part]) - {"tie_word_embeddings"}:
            assert written[part][key] == published[part][key], key
    assert not {"rope_parameters", "num_local_experts"} & set(written["text_config"])
    assert Qwen3VLConfig.from_pretrained(tmp_path) == hub


@pytest.mark.parametrize(
    ("flags", "has_head", "tied"),
    [((True, True), False, True), ((False, False), True, False),
     ((True, False), True, False), ((False, True), False, True), ((None, True), True, False),
     ((True, None), False, True)],
)  # fmt: skip
def test_tie_flags_decide_together_and_the_checkpoint_when_they_do_not(
    flags, has_head, tied, tmp_path, caplog
):
    config = tiny_config()
    tiny_model().save_pretrained(tmp_path)
    values = config.to_dict()
    for target, flag in zip((values, values["text_config"]), flags, strict=True):
        target.pop("tie_word_embeddings")
        if flag is not None:
            target["tie_word_embeddings"] = flag
    (tmp_path / "config.json").write_text(json.dumps(values))
    if not has_head:
        file = tmp_path / "model.safetensors"
        arrays = load_file(file)
        del arrays["lm_head.weight"]
        save_file(arrays, file)
    with caplog.at_level(logging.INFO, logger="paddle_vl"):
        model = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
    assert model.config.tie_word_embeddings == tied
    assert ("lm_head.weight" in state(model)) != tied
    assert ("flags disagree" in caplog.text) == (flags[0] != flags[1])


def test_missing_unexpected_and_misshapen_keys_are_named_all_at_once(golden_copy):
    folder = golden_copy("dense_untied")
    arrays = load_file(folder / "model.safetensors")
    del arrays["lm_head.weight"], arrays["model.visual.pos_embed.weight"]
    arrays["model.visual.extra.weight_scale_inv"] = np.zeros((2, 2), np.float32)
    arrays["model.language_model.norm.weight"] = np.ones(63, np.float32)
    save_file(arrays, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="does not fit the model") as error:
        Qwen3VLForConditionalGeneration.from_pretrained(folder)
    message = str(error.value)
    assert "2 missing: lm_head.weight, model.visual.pos_embed.weight" in message
    assert "1 unexpected: model.visual.extra.weight_scale_inv" in message
    assert "load the model that they were made from" in message
    assert "1 misshapen: model.language_model.norm.weight (file [63], model [64])" in message


def test_bfloat16_weights_are_read_and_written(tmp_path):
    model = tiny_model()
    for parameter in model.parameters():
        rounded = parameter.numpy().view(np.uint32) & np.uint32(0xFFFF0000)
        parameter.set_value(rounded.view(np.float32))
    wanted = state(model)
    model.to(dtype="bfloat16")
    model.save_pretrained(tmp_path)
    header = read_header(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in header.values()} == {"BF16"}
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
    for key, array in state(loaded).items():
        np.testing.assert_array_equal(array, wanted[key])
    narrow = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype="bfloat16")
    assert {parameter.dtype for parameter in narrow.parameters()} == {paddle.bfloat16}


def test_a_truncated_file_is_refused_by_name(golden_copy):
    folder = golden_copy("dense_tied")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RuntimeError, match=r"model\.safetensors is not a complete.*again"):
        Qwen3VLForConditionalGeneration.from_pretrained(folder)


def test_a_missing_shard_and_an_empty_folder_are_refused_by_name(tmp_path):
    tiny_model().save_pretrained(tmp_path, max_shard_bytes=20_000)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(RuntimeError, match=shard.name):
        Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
    for file in tmp_path.glob("model*"):
        file.unlink()
    with pytest.raises(RuntimeError, match="neither model.safetensors nor"):
        Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)


def test_what_hf_writes_without_effect_is_read_over():
    values = tiny_config().to_dict() | {"torch_dtype": "bfloat16", "id2label": {"0": "a"}}
    values["text_config"] |= {"use_cache": True, "pruned_heads": {}, "dtype": "bfloat16"}
    values["vision_config"] |= {"return_dict": True}
    assert Qwen3VLConfig.from_dict(values) == tiny_config()


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
print("GREW", peak() - before, len(model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's peak memory")
def test_loading_needs_no_more_than_the_model_and_its_largest_tensor(tmp_path):
    # The 6 MB matrices of 8 layers sum to more than the largest tensor, 40 MB.
    config = tiny_config(
        vocab_size=160_000, hidden_size=64, intermediate_size=24_000, num_hidden_layers=8
    )
    model = Qwen3VLForConditionalGeneration.from_config(config)
    model.save_pretrained(tmp_path)
    sizes = [array.nbytes for array in state(model).values()]
    del model
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY_PROBE, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    grew = int(done.stdout.split("GREW")[1].split()[0])
    slack = 16 << 20
    assert sum(sizes) * 0.9 < grew <= sum(sizes) + max(sizes) + slack
