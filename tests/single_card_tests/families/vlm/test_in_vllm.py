"""vLLM itself on folders of this package, by tools/check_vllm.py."""

import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import paddle
import pytest

from check_vllm import VLLM
from engine_answers import check, made_up_pictures
from paddle_vl import (
    LoRAConfig,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from paddle_vl.cli.main import main
from paddle_vl.families.paddleocr_vl.inputs.processor import TEMPLATE
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.modeling.config import TOKEN_IDS
from paddle_vl.testing import EXPERTS_3_5, tiny_qwen3_5_config, tiny_qwen3_vl_config
from paddle_vl.testing.qwen3_vl import EXPERTS, unlike_neutral
from paddle_vl.testing.tiny_run import VOCABULARY, write_processor
from tests.single_card_tests.families.paddleocr_vl.test_ocr_folder_check import ROWS
from tests.single_card_tests.families.vlm.test_folder_check import SPOILT
from tests.support.ocr_folders import write_folder
from tests.support.vllm_server import PYTHON, SIZES, needs_vllm

pytestmark = needs_vllm
# Kernels on the CPU have experts of widths that 32 divides, and of the delta rule these heads.
_WIDE = {"hidden_size": 32}
_SIZES_3_5 = {
    "head_dim": 32, "num_attention_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
    },
}  # fmt: skip
# All experts, as rounding to bfloat16 chooses others.
_ALL_EXPERTS = EXPERTS_3_5 | {"num_experts_per_tok": EXPERTS_3_5["num_experts"]}
KINDS: dict[str, dict[str, Any]] = {
    "dense": SIZES,
    "tied": SIZES | {"tie_word_embeddings": True},
    "moe": SIZES | EXPERTS | _WIDE | {"moe_intermediate_size": 12},
    "3.5": _SIZES_3_5,
    "3.5 moe": _SIZES_3_5 | _ALL_EXPERTS | _WIDE,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("vllm")
    write_processor(root / "processor", "Which colour? Please. red green blue")
    processor = VLProcessor.from_pretrained(root / "processor")
    ids = {name: getattr(processor, name) for name in TOKEN_IDS}
    for kind, text in KINDS.items():
        make, model_class = tiny_qwen3_vl_config, Qwen3VLForConditionalGeneration
        if kind.startswith("3.5"):
            make, model_class = tiny_qwen3_5_config, Qwen3_5ForConditionalGeneration
        model = unlike_neutral(
            model_class, replace(make(vocab_size=VOCABULARY, **text), **ids), None, 0
        )
        model.generation_config = processor.generation_config
        model.save_pretrained(root / kind)
        processor.save_pretrained(root / kind)
    # That of the golden files has no loop over parts, which tells vLLM that there are any.
    (write_folder(root / "ocr") / "chat_template.jinja").write_text(TEMPLATE)
    return root


def lines(root: Path, folder: Path, adapter: Path | None = None) -> list[str]:
    pictures = made_up_pictures(root)
    questions = [(pictures[0], "What is this?"), (pictures[1], "Which?"), (None, "Name a colour.")]
    asked = Namespace(
        max_new_tokens=8, adapter=adapter, max_lora_rank=16, max_model_len=1024, dtype=None
    )
    return [*check(VLLM, folder, questions, Path(str(PYTHON)), asked)]


@pytest.mark.parametrize("kind", [*KINDS, "ocr"])
def test_a_folder_gives_our_answers(kind, root):
    assert main(["check-folder", str(root / kind), "--for", "vllm"]) == 0
    found = lines(root, root / kind)
    assert [line for line in found if not line.startswith("equal: ")] == []
    assert len(found) == 3


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("dense", {"rank_pattern": {"q_proj": 2}, "target_modules": ["q_proj", "down_proj"]}),
        ("dense", {"use_rslora": True, "target_modules": ["o_proj", "qkv", "linear_fc1"]}),
        ("3.5", {"target_modules": ["all-linear"]}),
    ],
)
def test_an_adapter_gives_our_answers(kind, settings, root, tmp_path):
    is_older = kind == "dense"
    model_class = Qwen3VLForConditionalGeneration if is_older else Qwen3_5ForConditionalGeneration
    model = model_class.from_pretrained(root / kind)
    model.add_lora(LoRAConfig(r=4, **settings))
    paddle.seed(0)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.set_value(paddle.randn(parameter.shape) * 0.1)
    model.save_adapter(tmp_path)
    assert main(["check-folder", str(tmp_path), "--for", "vllm"]) == 0
    for line in lines(root, root / kind, tmp_path):
        assert line.startswith("equal: "), line


@pytest.mark.parametrize(
    ("kind", "what", "begins"),
    [
        ("dense", "a name", "refused: "),
        ("3.5", "a name of 3.5", "refused: "),
        ("moe", "swapped experts", "refused: "),
        ("moe", "a tensor too many", "refused: "),
        ("dense", "a bias too many", "differs: vLLM answers, and this package refuses: "),
        ("ocr", "a tensor too many", "refused: "),
        ("ocr", "a head that is not the embedding", "equal: "),
        ("ocr", "limits that are nested", "refused: "),
    ],
)
def test_vllm_makes_of_a_spoilt_folder_what_check_folder_says(kind, what, begins, root, tmp_path):
    shutil.copytree(root / kind, tmp_path / "folder")
    (ROWS[what].spoil if kind == "ocr" else SPOILT[what][1])(tmp_path / "folder")
    for line in lines(root, tmp_path / "folder"):
        assert line.startswith(begins), line
