"""The model of `model.config`.

Guarantees: a published size can be named instead of a file; an unknown name, and a size that does
not fit the tokenizer, are refused with the reason.
"""

import pytest

from paddle_vl import Qwen3VLConfig
from paddle_vl.config.load import load_run_config
from paddle_vl.config.validate import launch_problems
from paddle_vl.families.vlm.folders.processor_fit import model_config
from paddle_vl.families.vlm.inputs.processor import VLProcessor


@pytest.fixture(scope="module")
def processor(run_file) -> VLProcessor:
    return VLProcessor.from_pretrained(load_run_config(run_file, []).data.processor)


def test_a_published_size_is_named_in_place_of_a_file(processor):
    assert model_config(Qwen3VLConfig, "Qwen3-VL-2B-Instruct", processor) == Qwen3VLConfig.named(
        "qwen3-vl-2b"
    )


def test_what_is_neither_file_nor_size_is_refused(processor):
    with pytest.raises(ValueError, match="model.config: there is no file qwen3-vl-7b, and .*-235b"):
        model_config(Qwen3VLConfig, "qwen3-vl-7b", processor)


@pytest.mark.parametrize(("source", "is_absent"), [("none.json", True), ("qwen3-vl-2b", False)])
def test_an_absent_file_is_found_before_the_launch(run_file, source, is_absent):
    problems = launch_problems(load_run_config(run_file, [f"model.config={source}"]), "cpu")
    assert any("model.config: no file" in problem for problem in problems) == is_absent
