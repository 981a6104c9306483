"""One export of Qwen3-VL for all files of tests."""

from pathlib import Path

import pytest

from paddle_vl.export.qwen3_vl.programs import model_to_export
from paddle_vl.export.writing import export_model
from tests.single_card_tests.families.qwen3_vl.chat_builders import tiny_processor
from tests.support.exports import HAS_ONNX
from tests.support.made_once import made_once
from tests.support.tiny import tiny_model


@pytest.fixture(scope="session")
def model():
    # The ids of the control tokens are the processor's, which end answers of the export too.
    model = tiny_model(vocab_size=320)
    model.generation_config = tiny_processor().generation_config
    return model


@pytest.fixture(scope="session")
def folder(model, tmp_path_factory) -> Path:
    """In float32, in ONNX too if that is installed."""

    def export(out: Path) -> None:
        to_export = model_to_export(model, tiny_processor().save_pretrained)
        export_model(to_export, Path("tiny"), out, onnx=HAS_ONNX)

    return made_once(tmp_path_factory, "qwen3_vl_export", export)
