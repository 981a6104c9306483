"""pi07 from a folder of Gemma 3, and a policy's folder back to OpenTau.

Guarantees: what `tools/check_parity.py pi07_start` compares; keys of all writers of Gemma 3 are
read; sizes come from the folder, and others are refused with both values; only the size of images
may differ, which is logged; the example for eight GPUs is a policy on the published 4B folder and
trains on a small one from the command line; what a saved policy has is what OpenTau writes, and a
folder that is read and written again is the same.
"""

import json
import logging
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import pytest
import yaml
from safetensors.numpy import load_file, save_file

import make_demonstrations
from paddle_vl import PI07Config, PI07HighLevelPlanner, PI07LowLevelPolicy
from paddle_vl.checkpoint.safetensors_io import (
    TensorToWrite,
    encoded,
    read_checkpoint_headers,
    read_header,
    write_file,
)
from paddle_vl.checkpoint.writing import parameter_array
from paddle_vl.cli.main import main
from paddle_vl.config.families import family_of_folder, model_values
from paddle_vl.config.load import load_run_config
from paddle_vl.families.pi07.config import PI07PlannerConfig
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.gemma import with_backbone
from paddle_vl.families.pi07.prefix import LABELS
from parity.pi07_start import StartFolders, run_cases
from tests.support.pi07_golden import (
    CharacterTokenizer,
    FirstValueActionTokenizer,
    character_tokenizer,
)
from tests.support.tiny import GOLDEN

CASE = GOLDEN / "pi07_start"
HUB = CASE / "hub_same"
EXAMPLE = Path(__file__).parents[4] / "configs" / "pi07" / "one_node_8_gpus.yaml"
VALUES = json.loads((CASE / "policy_folder" / "config.json").read_text())
TABLE = "gemma3_with_expert.gemma3.model.language_model.embed_tokens.weight"
# Of Gemma 3 4B, as published.
PUBLISHED = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896,
        "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
        "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
PUBLISHED_BYTES = 8_600_158_944


def values(**changes) -> dict:
    """A policy's configuration without that of its backbone."""
    vlm = {name: value for name, value in VALUES["vlm_config"].items() if name != "gemma3_config"}
    return VALUES | {"vlm_config": vlm} | changes


def policy_on(folder: Path = HUB, dtype: str = "float32", **changes) -> PI07LowLevelPolicy:
    config = PI07Config.from_dict(with_backbone(values(**changes), folder))
    tokenizers = {
        "tokenizer": CharacterTokenizer(),
        "action_tokenizer": FirstValueActionTokenizer(),
    }
    return PI07LowLevelPolicy.from_pretrained(folder, config=config, dtype=dtype, **tokenizers)


def weights(policy) -> dict[str, np.ndarray]:
    return {item.key: parameter_array(item) for item in policy.model.stored_parameters()}


def test_golden_cases():
    golden = StartFolders([CASE])
    reports = list(run_cases(golden, golden.cases, 1.0, "float32"))
    assert [report.name for report in reports] == ["pi07_start/laws", "pi07_start/hub_same"]
    for report in reports:
        assert report.passed, [report.line(), *report.failure_lines()]


def test_a_wrong_value_fails(tmp_path):
    folder = shutil.copytree(CASE, tmp_path / "case")
    numbers = load_file(folder / "numbers_same.safetensors")
    numbers["hf_text_hidden"][0, 3, 1] += 1e-2
    save_file(numbers, folder / "numbers_same.safetensors")
    golden = StartFolders([folder])
    case = next(case for case in golden.cases if case.name.endswith("hub_same"))
    (report,) = run_cases(golden, [case], 1.0, "float32")
    assert [failure.name for failure in report.failures] == ["hf_text_hidden"]


def newer(key: str) -> str:
    return f"model.{key.replace('language_model.model.', 'language_model.')}"


def flat(key: str) -> str:
    return newer(key).replace("vision_tower.vision_model.", "vision_tower.")


@pytest.mark.parametrize("renamed", [str, newer, flat])
def test_every_tensor_has_its_place_under_the_names_of_all_writers(renamed, tmp_path):
    stored = {key: tensor.read() for key, tensor in read_checkpoint_headers(HUB).items()}
    save_file(
        {renamed(key): value for key, value in stored.items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text((HUB / "config.json").read_text())
    found, engine = weights(policy_on(tmp_path)), "gemma3_with_expert."
    for key, value in stored.items():
        layer = key.removeprefix("language_model.model.layers.")
        if layer != key:
            number, _, rest = layer.partition(".")
            ours = f"{engine}interleaved_layers.{number}.backbone_layer.{rest}"
        else:
            ours = f"{engine}gemma3.model.{key.replace('language_model.model', 'language_model')}"
        np.testing.assert_array_equal(found[ours], value, err_msg=key)


def test_sizes_are_those_of_the_folder_and_others_are_refused():
    text = {"hidden_size": 96, "rope_theta": 5.0, "rope_scaling": None}
    given = values()["vlm_config"] | {"gemma3_config": {"text_config": text}}
    with pytest.raises(ValueError, match=r"hub_same.*hidden_size is 96, not 64; .*rope_theta is 5"):
        policy_on(vlm_config=given)
    config = policy_on().config.vlm_config.gemma3_config
    assert (config.text_config.vocab_size, config.vision_config.hidden_size) == (256, 32)
    with pytest.raises(
        ValueError, match="says nothing of the policy: pass its config, a PI07Config"
    ):
        PI07LowLevelPolicy.from_pretrained(HUB, tokenizer=CharacterTokenizer())


def test_positions_are_resampled_for_other_images(caplog):
    with caplog.at_level(logging.INFO, logger="paddle_vl"):
        policy = policy_on(resize_imgs_with_padding=[28, 28])
    assert "56 pixels and the policy's have 28: the tower's 16 positions are" in caplog.text
    table = policy.model.prefix.video_encoder.tower.position_embedding.weight.numpy()
    stored = read_checkpoint_headers(HUB)
    (old,) = (t.read() for key, t in stored.items() if "position_embedding" in key)
    # Each new patch has four old ones around its centre.
    means = old.reshape(2, 2, 2, 2, -1).mean(axis=(1, 3)).reshape(4, -1)
    np.testing.assert_allclose(table, means, rtol=0, atol=2**-8 * np.abs(means).max())


def write_run(folder: Path, **model) -> Path:
    data = {"train": ["a.jsonl"], "processor": "p"}
    settings = {"model": model, "data": data, "train": {"output_dir": "out", "max_steps": 4}}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return folder / "run.yaml"


def test_a_run_names_both_the_backbone_and_the_policy(tmp_path):
    with pytest.raises(ValueError, match="gemma3 is the backbone of a pi07 policy, not a whole"):
        load_run_config(write_run(tmp_path, pretrained=str(HUB)))
    load_run_config(write_run(tmp_path, pretrained=str(HUB), config=values()))
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    with pytest.raises(ValueError, match=r"both are set.*as the checkpoint has its own"):
        load_run_config(write_run(tmp_path, pretrained=str(tmp_path), config=values()))
    asking = values(vlm_config={"load_pretrained_gemma3": True})
    run = load_run_config(write_run(tmp_path, config=asking), find=lambda name, value: f"<{value}>")
    assert run.model.pretrained == "<google/gemma-3-4b-pt>"


def test_the_example_for_eight_gpus_has_the_published_sizes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    run = load_run_config(EXAMPLE)
    assert run.model.pretrained == "google/gemma-3-4b-pt"
    config = PI07Config.from_dict(with_backbone(model_values(run.model.config), tmp_path))
    assert config.vlm_config.gemma3_config.vision_config.image_size == 448
    engine = replace(config.vlm_config, discrete_action_vocab_size=2048)
    with paddle.LazyGuard():
        model = PI07LowLevelFlowMatching(
            replace(config, vlm_config=engine), {label: [5] for label in LABELS}
        )
    of_gemma = {k: s for k, s in model.whole_shapes().items() if ".gemma3." in k or "backbone" in k}
    # Without the positions of images of 896 pixels, in bfloat16.
    size = sum(2 * int(np.prod(shape)) for shape in of_gemma.values())
    assert size + 2 * 3072 * 1152 == PUBLISHED_BYTES


def test_the_example_trains_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tool", "data/demonstrations", "--num-samples", "8"])
    make_demonstrations.main()
    character_tokenizer().save_pretrained("data/demonstrations/processor")
    small = {"resize_imgs_with_padding": [28, 28], "n_obs_steps": 2, "proj_width": 16}
    small |= {"chunk_size": 4, "n_action_steps": 4, "spacetime_layer_stride": 2}
    expert = {"hidden_size": 16, "intermediate_size": 32, "adarms_cond_dim": 16, "vocab_size": 8}
    settings = [
        *(f"model.config.{name}={value}" for name, value in small.items()),
        f"model.config.vlm_config={{gemma_expert_config: {json.dumps(expert)}}}",
        *(f"model.policy.{name}=16" for name in ("prompt_max_length", "response_max_length")),
        f"model.pretrained={HUB}",
        *("model.compute_dtype=float32", "data.num_workers=0", "parallel={}"),
        "data.processor=data/demonstrations/processor",
        *("train.max_steps=2", "train.warmup_steps=1", "train.per_device_train_batch_size=2"),
    ]
    assert main(["train", str(EXAMPLE), *settings]) == 0
    trained = PI07LowLevelPolicy.from_pretrained("runs/pi07/final")
    table, start = weights(trained)[TABLE], weights(policy_on())[TABLE]
    # Two small steps away.
    assert 0 < np.abs(table - start).max() < 1e-4
    assert trained.config.vlm_config.gemma3_config.vision_config.image_size == 28


@pytest.fixture
def saved(tmp_path) -> Path:
    """A policy's folder in bfloat16; statistics are float32."""
    policy = policy_on(dtype="bfloat16")
    for normalizer in policy.normalizers.values():
        for rows in normalizer.tensors.values():
            rows[:] = 0.5
    policy.tokenizer, policy.action_tokenizer = character_tokenizer(), None
    policy.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_saved_policy_has_exactly_what_opentau_writes(saved):
    wanted = json.loads((CASE / "policy_folder.json").read_text())["in_file"]
    stored = read_header(saved / "model.safetensors")
    assert len(stored) == 153
    assert stored.keys() >= wanted.keys()
    for key, (_, shape) in wanted.items():
        dtype = "BF16" if key.startswith("model.") else "F32"
        assert (stored[key].dtype, list(stored[key].shape)) == (dtype, shape), key


def test_a_saved_planner_has_the_tensors_that_only_opentau_reads(tmp_path):
    shared = {name: VALUES[name] for name in ("input_features", "resize_imgs_with_padding")}
    given = with_backbone({"type": "pi07_high_level", **shared}, HUB)
    config = PI07PlannerConfig.from_dict(given)
    planner = PI07HighLevelPlanner.from_pretrained(
        HUB, config=config, tokenizer=CharacterTokenizer()
    )
    planner.tokenizer = character_tokenizer()
    planner.save_pretrained(tmp_path)
    stored, engine = read_header(tmp_path / "model.safetensors"), "model.gemma3_with_expert."
    entries = stored[f"{engine}discrete_action_embedding.weight"].shape[0]
    assert stored[f"{engine}da_head.weight"].shape == (entries, 64)
    assert stored[f"{engine}da_head.bias"].shape == (entries,)
    assert not any("expert." in key.removeprefix(engine) for key in stored)


def test_a_folder_that_is_read_and_written_again_is_the_same(saved, tmp_path):
    """With statistics and the expert's head as OpenTau may have them, and in two dtypes, which its
    own cast gives."""
    file, tensors = saved / "model.safetensors", []
    for key, tensor in read_header(file).items():
        found = tensor.copied(key)
        if "normalize" in key or key.endswith("gemma_expert.lm_head.weight"):
            bits = encoded(np.full(tensor.shape, 1.25), "BF16")
            found = TensorToWrite(key, tensor.shape, "BF16", partial(np.copy, bits))
        elif key.startswith(("model.state_proj", "model.action", "model.time")):
            values = tensor.read() * np.float32(1.001)
            found = TensorToWrite(key, tensor.shape, "F32", partial(np.copy, values))
        tensors.append(found)
    write_file(tmp_path / "theirs.safetensors", tensors)
    shutil.copy(tmp_path / "theirs.safetensors", file)
    (saved / "config.json").write_text(json.dumps(VALUES))
    policy = PI07LowLevelPolicy.from_pretrained(saved, dtype="auto")
    # A run may delete the checkpoint that it continues.
    shutil.rmtree(saved)
    policy.save_pretrained(tmp_path / "ours")
    before, after = (
        {key: (t.dtype, t.shape, t.read().tobytes()) for key, t in read_header(each).items()}
        for each in (tmp_path / "theirs.safetensors", tmp_path / "ours" / "model.safetensors")
    )
    assert after == before
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == VALUES


def test_gemmas_own_attention_is_kept_and_not_exported(saved):
    given = json.loads((saved / "config.json").read_text())
    assert "use_gemma3_attention" not in given["vlm_config"]
    given["vlm_config"]["use_gemma3_attention"] = True
    config = PI07Config.from_dict(given)
    assert PI07Config.from_dict(config.to_dict()).vlm_config.use_gemma3_attention
    config.save_pretrained(saved)
    with pytest.raises(ValueError, match="has use_gemma3_attention, and exported layers share"):
        family_of_folder(saved).ask("export", saved, None)
    del given["vlm_config"]["gemma3_config"]["text_config"]["sliding_window"]
    with pytest.raises(ValueError, match=r"needs text_config\.sliding_window, which is None"):
        PI07Config.from_dict(given)
