"""PaddleX itself on folders of this package, by tools/check_paddlex.py. Its environment is made
from PyPI, or is that of the interpreter PADDLEX_PYTHON."""

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from check_paddlex import PADDLEX, environment
from engine_answers import check, made_up_pictures
from paddle_vl.cli.main import main
from paddle_vl.testing.tiny_run import write_pictures
from tests.single_card_tests.families.paddleocr_vl.test_ocr_folder_check import ROWS
from tests.support.document_run import write_document_run
from tests.support.ocr_folders import write_folder

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    given = os.environ.get("PADDLEX_PYTHON")
    return Path(given) if given else environment(tmp_path_factory.mktemp("paddlex"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> list[tuple[str, str]]:
    images = made_up_pictures(tmp_path_factory.mktemp("pictures"))
    return list(zip(images, ("OCR:", "Table Recognition:"), strict=True))


def asked(num_tokens: int) -> Namespace:
    return Namespace(max_new_tokens=num_tokens)


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize(
    "tuned", [{}, {"lora": {"r": 2, "target_modules": ["q_proj", "linear_2"]}}]
)
def test_a_trained_folder_gives_our_answers(kind, tuned, python, questions, tmp_path):
    folder = write_folder(tmp_path / "start", kind)
    rows = [
        {"messages": [{"role": "user", "content": "<image>OCR:"},
                      {"role": "assistant", "content": colour}], "images": [file]}
        for colour, file in write_pictures(tmp_path, 4)
    ]  # fmt: skip
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {
        "model": {"pretrained": str(folder)} | tuned,
        "data": {"train": [str(data)], "max_length": 128, "num_workers": 0},
        "train": {"output_dir": str(tmp_path / "out"), "max_steps": 2, "learning_rate": 0.01,
                  "per_device_train_batch_size": 2, "warmup_steps": 0},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    trained = tmp_path / "out" / "final"
    if tuned:
        assert main(["merge", str(trained), str(tmp_path / "merged")]) == 0
        trained = tmp_path / "merged"
    assert main(["check-folder", str(trained), "--for", "paddlex"]) == 0
    weights = [(each / "model.safetensors").read_bytes() for each in (folder, trained)]
    assert weights[0] != weights[1]
    for line in check(PADDLEX, trained, questions, python, asked(16)):
        assert line.startswith("equal: "), line


def test_a_model_of_fresh_weights_with_a_tokenizer_of_its_own(python, questions, tmp_path):
    assert main(["train", str(write_document_run(tmp_path))]) == 0
    for line in check(PADDLEX, tmp_path / "out" / "final", questions, python, asked(8)):
        assert line.startswith("equal: "), line


@pytest.mark.parametrize("what", ROWS)
def test_paddlex_makes_of_a_spoilt_folder_what_check_folder_says(what, python, questions, tmp_path):
    folder = write_folder(tmp_path / "whole")
    ROWS[what].spoil(folder)
    for line in check(PADDLEX, folder, questions[:1], python, asked(4)):
        assert line.startswith(ROWS[what].in_paddlex), line
