"""A tiny run shared by several test files."""

from pathlib import Path

import pytest

from tests.single_card_tests.train.whole_runs import build, evaluated


@pytest.fixture(scope="module")
def whole_run(run_file, tmp_path_factory) -> Path:
    """Four uninterrupted steps with evaluation and a checkpoint every second step."""
    output_dir = tmp_path_factory.mktemp("whole") / "out"
    data = run_file.with_name("test.jsonl")
    trainer = build(run_file, output_dir, *evaluated(data))
    assert trainer.run() is None
    return output_dir
