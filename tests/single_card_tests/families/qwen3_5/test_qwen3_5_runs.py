"""Runs of a small Qwen3.5 from files: frozen parts of either mixer, bfloat16 with float32 rates of
decay and gated norms, and the memory of a step by the page's formula."""

import fnmatch
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from paddle.base import core
from safetensors.numpy import load_file

from paddle_vl import Qwen3_5ForConditionalGeneration
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.families.vlm.modeling.delta_config import FULL, LINEAR
from paddle_vl.nn.delta_rule import CHUNK
from paddle_vl.testing import emulated_bfloat16, tiny_qwen3_5_config
from tests.single_card_tests.train.tiny_run import MODEL_3_5, write_tiny_run
from tests.single_card_tests.train.whole_runs import assert_same_run, build, evaluated
from tests.support.finished_runs import arrays_of
from tests.support.implementations import implementation

FROZEN = ["model.visual.blocks.*", "*.layers.0.linear_attn.*", "*.in_proj_a.*", "*.k_proj.*"]
RESUMED = ("train.save_steps=2", "train.resume_from_checkpoint=auto")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("run"), model=MODEL_3_5)


@pytest.fixture(scope="module")
def frozen_run(run_file, tmp_path_factory) -> Path:
    """A run with frozen parts; its folder has the weights from before, too."""
    folder = tmp_path_factory.mktemp("frozen") / "out"
    trainer = build(
        run_file, folder, f"model.freeze={json.dumps(FROZEN)}",
        *evaluated(run_file.with_name("test.jsonl")),
    )  # fmt: skip
    trainer.runner.model.save_pretrained(folder.with_name("before"))
    trainer.run()
    return folder


def test_parts_of_either_mixer_are_frozen(frozen_run, run_file):
    before = load_file(frozen_run.with_name("before") / "model.safetensors")
    after = load_file(frozen_run / "final" / "model.safetensors")
    for key, array in before.items():
        is_frozen = any(fnmatch.fnmatchcase(key, pattern) for pattern in FROZEN)
        assert np.array_equal(after[key], array) == is_frozen, key
    # The family's splitting, which that of data.processor is not.
    assert r"\\p{L}\\p{M}" in (frozen_run / "final" / "tokenizer.json").read_text()
    assert "p{M}" not in (run_file.with_name("processor") / "tokenizer.json").read_text()


def resumes(run_file: Path, tmp_path: Path, *more: str) -> Path:
    """A whole run, which one that continues its checkpoint equals."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    build(run_file, whole, *RESUMED, *more).run()
    shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
    shutil.copy(whole / "metrics.jsonl", resumed)
    build(run_file, resumed, *RESUMED, *more).run()
    assert_same_run(whole, resumed, begun_anew="sequence_length")
    return whole


def test_a_bfloat16_run_has_float32_rates_of_decay_and_resumes_to_the_bit(
    run_file, tmp_path, monkeypatch
):
    # That a CPU has no kernels for it.
    monkeypatch.setattr("paddle_vl.train.build.launch_problems", lambda *given: [])
    with emulated_bfloat16():
        whole = resumes(run_file, tmp_path, "model.compute_dtype=bfloat16", "train.max_steps=4")
    checkpoint = whole / "checkpoint-4"
    stored = read_checkpoint_headers(checkpoint)
    endings = (".linear_attn.A_log", ".linear_attn.norm.weight")
    arrays = arrays_of(checkpoint)
    for key, tensor in stored.items():
        is_wide = key.endswith(endings)
        assert (tensor.dtype == "F32", f"{key}/master_weight" in arrays) == (is_wide, not is_wide)
        assert arrays[f"{key}/moment1"].any(), key


def kept_values(text) -> dict[str, int]:
    """The page's formula: values per token that a layer of each kind keeps for its backward."""
    width, inner = text.hidden_size, text.intermediate_size
    queries = text.num_attention_heads * text.head_dim
    keys = text.num_key_value_heads * text.head_dim
    states = text.value_width * text.linear_key_head_dim // CHUNK
    mixers = {
        LINEAR: 2 * (2 * text.key_width + text.value_width) + 3 * text.value_width + states,
        FULL: 5 * queries + 3 * keys,
    }
    return {kind: 4 * width + mixer + 3 * inner for kind, mixer in mixers.items()}


@pytest.mark.parametrize("kind", [LINEAR, FULL])
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 64, "intermediate_size": 96, "linear_num_value_heads": 4},
        {"hidden_size": 128, "intermediate_size": 64, "linear_num_value_heads": 8},
    ],
)
@pytest.mark.parametrize(("kernels", "most"), [("compiled", 1.04), ("cpu", 1.3)])
def test_a_layer_keeps_what_the_page_says(kind, sizes, kernels, most):
    length, used = 256, []
    sizes = sizes | {"linear_key_head_dim": 32, "linear_value_head_dim": 24}
    ids = np.arange(2 * length).reshape(2, length) % 50
    batch = {"input_ids": ids, "labels": ids, "attention_mask": np.ones_like(ids)}
    with implementation(kernels):
        for number in (1, 2):
            layers = {"num_hidden_layers": number, "layer_types": [kind] * number}
            config = tiny_qwen3_5_config(**sizes, **layers)
            model = Qwen3_5ForConditionalGeneration.from_config(config)
            # What is made once.
            model(**batch, has_left_padding=False)
            before = core.host_memory_stat_current_value("Allocated", 0)
            loss = model(**batch, has_left_padding=False).loss
            used.append(core.host_memory_stat_current_value("Allocated", 0) - before)
            del loss
    found = (used[1] - used[0]) / (4 * ids.size)
    # Numbers per head, such as decays and the statistics of norms and attention, are not in it.
    assert 0.96 <= found / kept_values(config.text_config)[kind] <= most
