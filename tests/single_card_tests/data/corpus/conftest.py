"""A processor for documents about colours."""

import pytest

from paddle_vl.families.vlm.inputs.processor import Qwen3VLProcessor
from paddle_vl.testing.tiny_run import write_processor


@pytest.fixture(scope="package")
def processor(tmp_path_factory) -> Qwen3VLProcessor:
    folder = tmp_path_factory.mktemp("processor")
    write_processor(folder, "red green blue")
    return Qwen3VLProcessor.from_pretrained(folder)
