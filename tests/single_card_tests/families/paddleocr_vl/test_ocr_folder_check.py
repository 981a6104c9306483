"""Folders of PaddleOCR-VL against the rules of PaddleX, vLLM, FastDeploy and transformers. What
PaddleX itself makes of each is in `test_in_paddlex`, what vLLM makes of some in `test_in_vllm`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl import LoRAConfig
from paddle_vl.cli.main import main
from paddle_vl.config.families import family_of_folder
from paddle_vl.families.paddleocr_vl.folder_check import ENGINES
from paddle_vl.families.paddleocr_vl.model import PaddleOCRVLForConditionalGeneration
from tests.single_card_tests.families.vlm.test_folder_check import (
    config,
    tensors,
    without,
    written,
)
from tests.support.ocr_folders import GOLDEN, TABLE, write_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
NORM = "model.norm.weight"
LIMITS = {"min_pixels": 1536, "max_pixels": 15360}


class Row(NamedTuple):
    """A spoilt folder.

    Attributes:
        spoil: how it is spoilt.
        told: how the lines begin that each engine tells of it, beside those of the whole folder.
        in_paddlex: how the line of tools/check_paddlex.py begins.
    """

    spoil: Callable[[Path], object]
    told: dict[str, tuple[str, ...]]
    in_paddlex: str


def in_images(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return config(change, "preprocessor_config.json")


def nested(folder: Path) -> None:
    """The configuration as transformers 5 writes it."""
    shutil.copyfile(GOLDEN / "models" / "tied" / "config.json", folder / "config.json")


def index(folder: Path) -> None:
    names = dict.fromkeys(load_file(folder / WEIGHTS), SHARD)
    written(INDEX, {"metadata": {"total_size": 1}, "weight_map": names})(folder)


def sharded(folder: Path) -> None:
    """Weights under the name that PaddleFormers gives them."""
    index(folder)
    (folder / WEIGHTS).rename(folder / SHARD)


def without_pooling(arrays: dict[str, np.ndarray]) -> None:
    for name in [name for name in arrays if name.startswith("visual.vision_model.head.")]:
        del arrays[name]


def pooling_is_switched_off(folder: Path) -> None:
    tensors(without_pooling)(folder)
    config(lambda v: v["vision_config"].update(vision_use_head=False))(folder)


def template_of_1_0(folder: Path) -> None:
    templates = json.loads((GOLDEN / "templates" / "templates.json").read_text())["templates"]
    (folder / "chat_template.jinja").write_text(templates["1.0"])


def named(name: str) -> Callable[[Path], object]:
    text = f"Global:\n  model_name: {name}\n"
    return lambda folder: (folder / "inference.yml").write_text(text)


def in_layout_of_transformers(folder: Path) -> None:
    model = PaddleOCRVLForConditionalGeneration.from_pretrained(folder)
    model.save_layout = "transformers"
    model.save_pretrained(folder)


MODULES = "refused: names of transformers' modules, as model.language_model."
LACKS, OTHERS = "tensors that the folder lacks: ", "tensors that the model does not have: "
SHAPE = f"refused: tensors of another shape: {TABLE} [64, 32], not [32768, 32]"
ROWS: dict[str, Row] = {
    "no name": Row(
        without("inference.yml"), {"paddlex": ("missing: inference.yml",)}, "refused: FileNotFound"
    ),
    "a name that PaddleX does not know": Row(
        named("My-OCR"),
        {"paddlex": ("refused: inference.yml: Global.model_name is 'My-OCR', not PaddleOCR-VL",)},
        "refused: ValueError",
    ),
    "a nested configuration": Row(
        nested,
        {"paddlex": ("refused: config.json: the decoder's keys are in text_config",),
         "fastdeploy": ("lost: config.json: no rope_scaling.mrope_section: ",
                        "lost: config.json: no rope_theta: ")},
        "refused: TypeError",
    ),
    "weights under another name": Row(
        sharded,
        {"paddlex": (f"missing: {WEIGHTS}: PaddleX reads one file of this name",)},
        "refused: ValueError: No Paddle model files",
    ),
    "an index that is left over": Row(
        index, dict.fromkeys(ENGINES, ("lost: transformers reads model.safetensors, others the",)),
        "refused: FileNotFoundError",
    ),
    "no head": Row(
        tensors(lambda a: a.pop("lm_head.weight")),
        {"paddlex": (f"refused: {LACKS}lm_head.weight",),
         "fastdeploy": (f"lost: {LACKS}lm_head.weight",)},
        "refused: assert",
    ),
    "a head that is not the embedding": Row(
        tensors(lambda a: a.update({"lm_head.weight": a["lm_head.weight"][::-1].copy()})),
        {}, "equal"
    ),
    "no packing table": Row(
        tensors(lambda a: a.pop(TABLE)), {"paddlex": (f"refused: {LACKS}{TABLE}",)},
        "refused: assert",
    ),
    "a packing table of fewer rows": Row(
        tensors(lambda a: a.update({TABLE: a[TABLE][:64].copy()})),
        {"paddlex": (SHAPE,), "fastdeploy": (SHAPE,)}, "refused: RuntimeError",
    ),
    "no pooling head": Row(
        tensors(without_pooling),
        {"paddlex": (f"refused: {LACKS}visual.vision_model.head.attention",)},
        "refused: assert",
    ),
    "no pooling head, as the configuration says": Row(pooling_is_switched_off, {}, "equal"),
    "a pooling head against the configuration": Row(
        config(lambda v: v["vision_config"].update(vision_use_head=False)),
        {"paddlex": (f"refused: {OTHERS}visual.vision_model.head.attention",)}, "refused: assert",
    ),
    "a tensor too many": Row(
        tensors(lambda a: a.update({"extra": a[NORM].copy()})),
        {"paddlex": (f"refused: {OTHERS}extra",), "vllm": (f"refused: {OTHERS}extra",),
         "fastdeploy": (f"ignored: {OTHERS}extra",),
         "transformers": (f"ignored: {OTHERS}extra",)},
        "refused: assert",
    ),
    "names of transformers' modules": Row(
        in_layout_of_transformers,
        dict.fromkeys(("paddlex", "vllm", "fastdeploy"), (MODULES,)), "refused: ValueError",
    ),
    "no tokenizer of SentencePiece": Row(
        without("tokenizer.model"), {"paddlex": ("missing: tokenizer.model",)}, "refused: TypeError"
    ),
    "no tokenizer of transformers": Row(
        without("tokenizer.json"),
        dict.fromkeys(("fastdeploy", "transformers"), ("missing: tokenizer.json",))
        | dict.fromkeys(("paddlex", "vllm"), ("unchecked: not read here: there is no tokenizer",)),
        "differs: PaddleX answers, and this package refuses",
    ),
    "no chat template": Row(
        without("chat_template.jinja"),
        dict.fromkeys(ENGINES, ("missing: a chat template: chat_template.jinja",)),
        "refused: FileNotFoundError",
    ),
    "no settings of images": Row(
        without("preprocessor_config.json"),
        dict.fromkeys(ENGINES, ("missing: preprocessor_config.json",)), "refused: FileNotFound",
    ),
    "no settings of the tokenizer": Row(
        without("tokenizer_config.json"),
        dict.fromkeys(("vllm", "fastdeploy", "transformers"), ("missing: tokenizer_config.json",))
        | {"paddlex": ("lost: tokenizer_config.json: add_bos_token is None: PaddleX begins",)},
        "differs: ",
    ),
    "a start in front of every prompt": Row(
        config(lambda v: v.update(add_bos_token=True), "tokenizer_config.json"),
        {"paddlex": ("lost: tokenizer_config.json: add_bos_token is True: PaddleX begins every",)},
        "differs: ",
    ),
    "limits that are nested": Row(
        in_images(lambda v: [v.pop(name) for name in LIMITS]),
        dict.fromkeys(
            ("vllm", "transformers"),
            ("refused: preprocessor_config.json: size has no longest_edge: transformers ends",),
        )
        | {"paddlex": ("lost: preprocessor_config.json: no min_pixels and max_pixels at the top",),
         "fastdeploy": ("lost: preprocessor_config.json: no min_pixels, max_pixels",)},
        "differs: ",
    ),
    "no base of the rotary": Row(
        config(lambda v: v.pop("rope_theta")),
        dict.fromkeys(ENGINES, ("lost: config.json: no rope_theta", "unchecked: not read here: ")),
        "differs: PaddleX answers, and this package refuses",
    ),
    "sampling": Row(
        config(lambda v: v.update(do_sample=True), "generation_config.json"),
        {"paddlex": ("refused: generation_config.json: do_sample: PaddleX ends with an error",)},
        "refused: TypeError",
    ),
    "files of two versions": Row(
        template_of_1_0,
        dict.fromkeys(ENGINES, ("lost: files of several versions: the chat template of 1.0, ",)),
        "equal",
    ),
    "the name of 1.6": Row(
        named("PaddleOCR-VL-1.6-0.9B"),
        dict.fromkeys(ENGINES, ("note: the files are of PaddleOCR-VL 1.6",)), "equal",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("ocr") / "whole")


def findings(folder: Path, engine: str) -> list[str]:
    """What is told of a folder, without what is told of a whole one."""
    fits, told = family_of_folder(folder).ask("check_folder", folder, folder, engine)
    verdict, kinds = told.pop(), {text.partition(":")[0] for text in told}
    assert fits == (kinds <= {"ignored", "note"})
    assert verdict.startswith("fits" if fits else ("does not fit", "was not compared"))
    usual = ("note: the files are of PaddleOCR-VL 1.5", f"ignored: {OTHERS}visual.")
    return [text for text in told if not text.startswith(usual)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_written_folder_fits(engine, whole):
    assert findings(whole, engine) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_folder_of_fresh_weights_fits(engine, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    model = PaddleOCRVLForConditionalGeneration.from_pretrained(whole)
    fresh = PaddleOCRVLForConditionalGeneration.from_config(model.config)
    fresh.save_pretrained(tmp_path)
    assert findings(tmp_path, engine) == []


@pytest.mark.parametrize(("what", "engine"), [(what, each) for what in ROWS for each in ENGINES])
def test_what_is_spoilt_is_told(what, engine, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    ROWS[what].spoil(tmp_path)
    told, expected = findings(tmp_path, engine), ROWS[what].told.get(engine, ())
    assert len(told) == len(expected), told
    for text, start in zip(told, expected, strict=True):
        assert text.startswith(start)


@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_are_merged_but_for_transformers(engine, whole, tmp_path, capsys):
    model = PaddleOCRVLForConditionalGeneration.from_pretrained(whole)
    model.add_lora(LoRAConfig(r=2, target_modules=["q_proj", "linear_1"]))
    model.save_adapter(tmp_path / "adapter")
    arguments = ["check-folder", str(tmp_path / "adapter"), "--for", engine]
    assert main(arguments) == (engine != "transformers")
    told = "adapters of paddleocr_vl: merge them with paddle-vl merge"
    assert (told in capsys.readouterr().out) == (engine != "transformers")
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    assert findings(tmp_path / "merged", engine) == []


def test_sglangs_rules_are_not_here(whole, capsys):
    assert main(["check-folder", str(whole), "--for", "sglang"]) == 1
    assert "unchecked: the rules of sglang for PaddleOCR-VL are not" in capsys.readouterr().out
