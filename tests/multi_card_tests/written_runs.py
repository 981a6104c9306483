"""Runs on disk for the table of `one_device`."""

import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file, save_file

from paddle_vl.config.families import family_of
from paddle_vl.families.vlm.folders.processor_fit import model_config
from paddle_vl.families.vlm.inputs.processor import Qwen3VLProcessor
from paddle_vl.families.vlm.modeling.config import VLConfig
from tests.single_card_tests.families.pi07.test_pi07_start import HUB, character_tokenizer
from tests.single_card_tests.train import tiny_policy_run, tiny_run
from tests.single_card_tests.train.corpus_run import write_corpus_run
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import MODEL as TINY
from tests.support.preference_runs import write_preference_run
from tests.support.topology_runs import train, write_mixed_run


def changed(model: dict[str, Any], vision: dict | None = None, **text: Any) -> dict[str, Any]:
    """A model with other entries of its configurations."""
    return model | {
        "text_config": model["text_config"] | text,
        "vision_config": model["vision_config"] | (vision or {}),
    }


# The tower's three feature levels cross two boundaries of interleaved stages.
MODEL = changed(TINY, {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]}, num_hidden_layers=8)
HEADS = changed(MODEL, num_attention_heads=8, num_key_value_heads=2)
TOWERS = changed(MODEL, {"hidden_size": 32, "num_heads": 8})
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
_FEW = _EXPERTS | {"num_experts": 4, "output_router_logits": True}
_MOE = {"model_type": "qwen3_vl_moe"}
EXPERTS = _MOE | changed(
    MODEL, num_experts=8, mlp_only_layers=[1], num_hidden_layers=3, **_EXPERTS
)  # fmt: skip
BALANCED = changed(
    EXPERTS, output_router_logits=True, router_aux_loss_coef=1.0, num_attention_heads=4
)  # fmt: skip
FEW_EXPERTS = _MOE | changed(TINY, **_FEW)
FOUR_LAYERS = changed(TINY, num_hidden_layers=4)
MODEL_3_5, MODEL_OCR = tiny_run.MODEL_3_5, tiny_run.MODEL_OCR
EXPERTS_3_5 = changed(MODEL_3_5, shared_expert_intermediate_size=16, **_FEW)
EXPERTS_3_5["model_type"] = "qwen3_5_moe"
del EXPERTS_3_5["text_config"]["intermediate_size"]
# N-grams on both stages of a pipeline; more than 11 tokens choose blocks of keys.
QWEN4 = changed(
    {key: value for key, value in EXPERTS_3_5.items() if key != "model_type"},
    output_gate_type="sigmoid", hc_count=3, hc_lowrank=4,
    indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8,
    indexer_budget=8, indexer_compress_ratio=4,
    ple_layer_ids=[1, 4], ple_embed_dim=24, heads_per_ngram=2, ple_conv_kernel_size=3,
    ngram_vocab_size_base=20, make_ngram_vocab_size_divisible_by=16, split_ngram_parts=3,
    eos_token_id=5,
) | {"model_type": "qwen4_exp"}  # fmt: skip
TOWER = ".vision_tower."


def _of_decoders(model: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A policy's model with more layers, whose norms of small rows would otherwise amplify the
    gradients of this small model."""
    model = deepcopy(model) | settings
    vlm = model["vlm_config"]
    decoders = [vlm["gemma3_config"]["text_config"]]
    decoders += [vlm["gemma_expert_config"]] if "gemma_expert_config" in vlm else []
    for decoder in decoders:
        decoder.update(num_hidden_layers=6 if len(decoders) > 1 else 4, rms_norm_eps=1e-2)
    return model


PLANNER_OF_FOUR = _of_decoders(tiny_policy_run.PLANNER)


def _with_base(run_file: Path, model: dict[str, Any]) -> Path:
    """Write a base model beside a run."""
    processor = Qwen3VLProcessor.from_pretrained(run_file.with_name("processor"))
    model_class = family_of(model).model_class()
    form: VLConfig = model_config(model_class.config_class, model, processor)
    model_class.from_config(form).save_pretrained(run_file.with_name("base"))
    return run_file


def untied(folder: Path) -> Path:
    run_file = tiny_run.write_tiny_run(folder, num_samples=16)
    return _with_base(run_file, TINY | {"tie_word_embeddings": False})


def qwen4_base(folder: Path) -> Path:
    return _with_base(write_mixed_run(folder, 24, QWEN4), QWEN4)


def document_base(folder: Path) -> Path:
    """Of a base model with a tied head, whose files have it twice, and with a pooling head."""
    run_file = _with_base(
        write_mixed_run(folder, 24, MODEL_OCR), MODEL_OCR | {"tie_word_embeddings": True}
    )
    file = run_file.with_name("base") / "model.safetensors"
    tensors = load_file(file)
    tensors["visual.vision_model.head.probe"] = np.ones([1, 1, 16], np.float32)
    save_file(tensors, file)
    return run_file


def colocated(folder: Path) -> Path:
    return _with_base(write_mixed_run(folder, 64, TOWERS), TOWERS)


def one_image(folder: Path) -> Path:
    """Of the samples of a step one has an image, and of another step none."""
    run_file = colocated(folder)
    file = run_file.with_name("train.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for number, record in enumerate(records):
        if number % 20 != 1:
            record["images"] = []
            for message in record["messages"]:
                message["content"] = message["content"].replace("<image>", "")
    tiny_run.write_records(file, records)
    return run_file


def rated_alike(folder: Path) -> Path:
    """Rated answers that are equal, of a model whose tower four ranks divide."""
    run_file = write_preference_run(folder, 16, changed(TINY, {"hidden_size": 16, "num_heads": 4}))
    rated = run_file.with_name("rated.jsonl")
    rows = [json.loads(line) for line in rated.read_text().splitlines()]
    for row in rows:
        row["messages"][-1]["content"] = "red"
    tiny_run.write_records(rated, rows)
    return run_file


def weighted_corpus(folder: Path) -> Path:
    """With loss weights and their default."""
    run_file = write_corpus_run(folder)
    text = run_file.read_text(encoding="utf-8")
    weighted = text.replace("format: image_text", "format: image_text\n    loss_weight: 0.25")
    assert weighted.count("loss_weight") == 1
    run_file.write_text(weighted, encoding="utf-8")
    return run_file


def _with_few(run_file: Path) -> Path:
    """Write five demonstrations for evaluations."""
    lines = run_file.with_name("arm-joint.jsonl").read_text().splitlines(keepends=True)
    run_file.with_name("few.jsonl").write_text("".join(lines[:5]))
    return run_file


def plain_policy(folder: Path, **model: Any) -> Path:
    return _with_few(write_tiny_policy_run(folder, 40, **model))


dropping_policy = partial(plain_policy, dropout=0.2)
open_policy, frozen_policy = (
    partial(plain_policy, **_of_decoders(tiny_policy_run.MODEL, **settings))
    for settings in ({"knowledge_insulation": False}, {"freeze_vision_encoder": True})
)


def policy(folder: Path) -> Path:
    """A run beside a base policy for adapters."""
    path = plain_policy(folder)
    _write_base(path)
    return path


def _write_base(path: Path) -> None:
    train(path, path.with_name("of_base"), ["train.max_steps=1", "train.learning_rate=0.0"])
    (path.with_name("of_base") / "final").rename(path.with_name("base"))


def policy_with_cameras(folder: Path, model: dict[str, Any] = tiny_policy_run.MODEL) -> Path:
    """Samples may lack a camera; four ranks divide the tower, which matters in the first step: a
    fresh projector is zero, and attention of a fresh tower this small is nearly uniform."""
    model = deepcopy(model) | {"empty_cameras": 1}
    tower = model["vlm_config"]["gemma3_config"]["vision_config"]
    tower.update(hidden_size=32, num_attention_heads=4)
    path = write_tiny_policy_run(folder, 40, **tiny_policy_run.MODEL)
    settings = yaml.safe_load(path.read_text())
    settings["model"]["config"] = model
    settings["data"]["drops"]["history_state_drop_prob"] = 0.5
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    _write_base(path)
    weights = path.with_name("base") / "model.safetensors"
    values = load_file(weights)
    for key, value in values.items():
        if key.endswith(".mm_input_projection_weight"):
            rng = np.random.default_rng(0)
            values[key] = rng.standard_normal(value.shape, np.float32).astype(value.dtype)
        elif TOWER in key and key.endswith(("q_proj.weight", "k_proj.weight")):
            values[key] = 20 * value
    save_file(values, weights)
    weights.with_name("manifest.json").unlink()
    settings["model"] = {"pretrained": str(path.with_name("base"))}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    file = path.with_name("arm-joint.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records[::3]:
        del record["camera1"]
        record.pop("subgoal1", None)
    tiny_run.write_records(file, records)
    return _with_few(path)


planner_with_cameras = partial(policy_with_cameras, model=tiny_policy_run.PLANNER)
dropping_cameras = partial(policy_with_cameras, model=tiny_policy_run.MODEL | {"dropout": 0.2})


def from_gemma(folder: Path) -> Path:
    """A policy on a folder of Gemma 3."""
    file = write_tiny_policy_run(folder)
    character_tokenizer().save_pretrained(folder / "processor")
    settings = yaml.safe_load(file.read_text())
    expert = {"hidden_size": 16, "intermediate_size": 32, "adarms_cond_dim": 16, "vocab_size": 8}
    config = tiny_policy_run.MODEL | {"vlm_config": {"gemma_expert_config": expert}}
    settings["model"] = {"pretrained": str(HUB), "config": config}
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return file
