"""PaddleOCR-VL's processor.

Guarantees: pixels, texts, ids and labels of the golden cases; a folder's files stay as they are;
the version of the template is told, and a folder that would train on other prompts is refused.
"""

import json
import logging
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.paddleocr_vl.inputs.processor import PaddleOCRVLProcessor
from paddle_vl.families.paddleocr_vl.inputs.tokenizer import train_tokenizer
from paddle_vl.families.paddleocr_vl.recipe import PaddleOCRVLRecipe
from paddle_vl.families.paddleocr_vl.settings import PaddleOCRVLRun
from paddle_vl.families.vlm.inputs.processor import VLProcessor, generation_settings
from parity import paddleocr_vl_inputs
from parity.golden import PaddleOCRFolders
from tests.single_card_tests.train.tiny_run import write_records
from tests.support.document_run import make_processor
from tests.support.ocr_folders import IMAGES, write_folder
from tests.support.tiny import GOLDEN

CASES = GOLDEN / "paddleocr_vl"
TABLES = json.loads((CASES / "templates" / "templates.json").read_text(encoding="utf-8"))
LIMITS = json.loads((CASES / "processor" / "processor.json").read_text(encoding="utf-8"))
HUB = LIMITS["hub_preprocessor_config"]
PAGE = np.full((42, 56, 3), 255, np.uint8)


def folder_of(folder: Path, template: str | None, settings: dict) -> Path:
    """A folder with the golden tokenizer."""
    shutil.copytree(CASES / "tokenizer", folder, dirs_exist_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def golden(kind: str) -> list:
    cases = PaddleOCRFolders([CASES])
    (case,) = (case for case in cases.cases if case.kind == kind)
    return list(getattr(paddleocr_vl_inputs, f"compare_{kind}")(case, 1.0))


@pytest.mark.parametrize("kind", ["processor", "templates"])
def test_golden_inputs(kind):
    found = golden(kind)
    assert len(found) == 2
    for report in found:
        assert report.passed, "\n".join([report.line(), *report.failure_lines(20)])


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("templates", "cuts_answers", False),
        ("templates", "task_prompts", {}),
        ("processor", "_resized", lambda self, height, width: (28, 56)),
    ],
)
def test_other_inputs_are_noticed(kind, name, value, monkeypatch):
    changed = PaddleOCRVLProcessor
    changed = changed.image_processor_class if kind == "processor" else changed
    monkeypatch.setattr(changed, name, value)
    assert not all(report.passed for report in golden(kind))


@pytest.mark.parametrize("version", ["1.0", "1.5"])
def test_files_of_a_folder_are_written_again(version, tmp_path):
    template = TABLES["templates"][version]
    source = folder_of(tmp_path / "source", template, HUB[version])
    (source / "inference.yml").write_text("Global: {model_name: PaddleOCR-VL-0.9B}\n")
    (source / "config.json").write_text('{"model_type": "paddleocr_vl"}')
    processor = VLProcessor.from_pretrained(source)
    assert isinstance(processor, PaddleOCRVLProcessor)
    processor.save_pretrained(tmp_path / "copy")
    written = {each.name for each in (tmp_path / "copy").iterdir()}
    assert written == {each.name for each in source.iterdir()} - {"config.json"}
    for name in written - {"tokenizer.json", "preprocessor_config.json"}:
        assert (tmp_path / "copy" / name).read_bytes() == (source / name).read_bytes()
    settings = json.loads((tmp_path / "copy" / "preprocessor_config.json").read_text())
    limits = {name: HUB[version][name] for name in ("min_pixels", "max_pixels")}
    assert settings == HUB[version] | {"size": limits}
    again = VLProcessor.from_pretrained(tmp_path / "copy")
    assert again.fingerprint() == processor.fingerprint()
    assert type(again) is PaddleOCRVLProcessor


def test_limits_are_read_at_the_top_and_in_size():
    read = PaddleOCRVLProcessor.image_processor_class.from_dict
    rest = {key: value for key, value in HUB["1.5"].items() if "pixels" not in key}
    wanted = read(HUB["1.5"])
    assert read(rest | {"size": {"min_pixels": 112896, "max_pixels": 1003520}}) == wanted
    assert read(rest | {"size": {"shortest_edge": 112896, "longest_edge": 1003520}}) == wanted
    with pytest.raises(ValueError, match=r"lacks size.shortest_edge, .*: PaddleOCR-VL's settings"):
        read(rest)


def test_bytes_of_a_broken_character_and_of_a_rare_one_come_back(tmp_path):
    folder = folder_of(tmp_path, TABLES["templates"]["1.5"], TABLES["config"])
    tokenizer = VLProcessor.from_pretrained(folder, model_type="paddleocr_vl").tokenizer
    for text in ("a  b", "\u4e2d\U0001f600", " \t\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # As HF: one replacement for each byte of a run that is no UTF-8 as a whole.
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "\u4e2d".encode() + b"\xe4"]
    assert tokenizer.decode(ids) == "\ufffd" * 4


def test_the_version_is_told_once_and_limits_of_another_are_a_warning(tmp_path, caplog):
    folder = folder_of(tmp_path, TABLES["templates"]["1.0"], HUB["1.5"])
    with caplog.at_level(logging.INFO):
        assert PaddleOCRVLProcessor.from_pretrained(folder).version == "1.0"
    told, warned = (record.getMessage() for record in caplog.records)
    assert "is of PaddleOCR-VL 1.0: answers follow 'Assistant: '; images have 112896" in told
    assert "is that of 1.0, and images have the limits of 1.5" in warned


def test_a_processor_of_another_version_than_the_model_is_refused(tmp_path):
    model = write_folder(tmp_path / "model", "tied", "1.5")
    processor = folder_of(tmp_path / "processor", TABLES["templates"]["1.0"], IMAGES)
    write_records(tmp_path / "train.jsonl", [{"query": "OCR:", "response": "red"}])
    values = {
        "model": {"pretrained": str(model)},
        "data": {"train": [str(tmp_path / "train.jsonl")], "processor": str(processor)},
        "train": {"output_dir": str(tmp_path / "out"), "max_steps": 1},
    }
    recipe = partial(PaddleOCRVLRecipe, checkpoint=None)
    told = r"another version than model\.pretrained: .* opens an answer with 'Assistant: ', and"
    with pytest.raises(ValueError, match=told):
        recipe(PaddleOCRVLRun.model_validate(values))
    shutil.copy(model / "chat_template.jinja", processor)
    assert recipe(PaddleOCRVLRun.model_validate(values)).processor.version == "1.5"


def test_settings_of_a_tokenizer_that_has_none_keep_its_start_out_of_prompts(tmp_path):
    folder = folder_of(tmp_path / "source", TABLES["templates"]["1.5"], HUB["1.5"])
    (folder / "tokenizer_config.json").unlink()
    PaddleOCRVLProcessor.from_pretrained(folder).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (written["add_bos_token"], written["tokenizer_class"]) == (False, "LlamaTokenizer")
    # transformers and vLLM take no image without it.
    assert written["image_token"] == "<|IMAGE_PLACEHOLDER|>"


def test_what_a_template_of_its_own_opens_answers_with_is_told(tmp_path, caplog):
    template = TABLES["templates"]["1.5"].replace("Assistant:", "Answer:")
    folder = folder_of(tmp_path, template, HUB["1.5"])
    with caplog.at_level(logging.INFO):
        assert PaddleOCRVLProcessor.from_pretrained(folder).version is None
    assert "is of no published version: answers follow 'Answer:" in caplog.text


def test_a_template_that_prints_an_image_by_a_variable_keeps_what_encloses_it(tmp_path):
    marks = '"<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"'
    early = TABLES["templates"]["1.0"].replace(marks, f"(image_token | default({marks}))")
    assert "default" in early.split("image_token")[1]
    folder = folder_of(tmp_path, early, HUB["1.0"])
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text()) | {"image_token": "<|IMAGE_PLACEHOLDER|>"}
    file.write_text(json.dumps(values))
    assert PaddleOCRVLProcessor.from_pretrained(folder).version == "1.0"
    (folder / "chat_template.jinja").write_text(early.replace("<|IMAGE_START|>", ""))
    with pytest.raises(ValueError, match=r"writes an image of a question as .*IMAGE_START.* once"):
        PaddleOCRVLProcessor.from_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"1\.0 and 1\.5 differ.*copy chat_template\.jinja"):
        PaddleOCRVLProcessor.from_pretrained(folder)


def test_videos_are_refused(tmp_path):
    processor = make_processor()
    messages = [{"role": "user", "content": "<video>OCR:"}]
    with pytest.raises(BadSampleError, match="has a video, and the model takes images alone"):
        processor(messages, videos=[np.zeros((4, 8, 8, 3), np.uint8)])
    processor.save_pretrained(tmp_path)
    assert not (tmp_path / "video_preprocessor_config.json").exists()
    with pytest.raises(ValueError, match="leave data.video_fps out"):
        VLProcessor.from_pretrained(tmp_path, video_fps=2.0)


def test_the_end_of_an_answer_is_known_without_generation_settings(tmp_path):
    make_processor().save_pretrained(tmp_path)
    found = generation_settings(tmp_path)
    assert found is not None
    assert (found.eos_token_ids, found.pad_token_id) == ([2], 0)


def test_an_image_that_would_be_shrunk_is_refused_where_asked():
    images = make_processor().refusing_shrunk().image_processor
    with pytest.raises(BadSampleError, match="56 x 42 pixels .* would be shrunk to 256 pixels"):
        images([PAGE])
    assert images([PAGE[:16, :16]])["image_grid_thw"].tolist() == [[1, 4, 4]]


@pytest.mark.parametrize("with_pixels", [True, False])
def test_a_thin_image_is_named_with_its_own_size(with_pixels, tmp_path):
    Image.new("RGB", (2, 700)).save(tmp_path / "thin.png")
    images = PaddleOCRVLProcessor.image_processor_class.from_dict(TABLES["config"])
    with pytest.raises(BadSampleError, match="2 x 700 pixels become at least 28 on each side"):
        images([tmp_path / "thin.png"], with_pixels)


def test_a_small_tokenizer_keeps_all_text_and_too_few_ids_are_refused():
    tokenizer = make_processor().tokenizer
    text = "red  blue \u4e2d<fcel>12<nl>\n<|LOC_750|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("<fcel><nl><|LOC_750|>")) == 3
    assert make_processor().tokenizer.to_json() == tokenizer.to_json()
    with pytest.raises(ValueError, match="vocab_size 270 is too small"):
        train_tokenizer(["letters"], 270, ["<fcel>"])
