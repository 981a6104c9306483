"""Training on a mix of sources.

Guarantees: the same seed gives the same bits, with workers and resumed; starting parses a few
documents, however many there are; plain settings of one source work; evaluation reads sources too;
bad documents are named or left out and counted; changed files are refused on resume,
and moved ones are not.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from paddle_vl.data.corpus import shard as shard_module
from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.train.corpus_run import write_corpus_run
from tests.single_card_tests.train.tiny_run import write_records
from tests.single_card_tests.train.whole_runs import assert_same_run, build, metrics_of

SAVES = ["train.save_steps=2"]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_corpus_run(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module", autouse=True)
def _few_lanes():
    """So that the lanes of a checkpoint continue after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paddle_vl.data.corpus.loader.PHASES", 2)
        yield


@pytest.fixture(scope="module")
def whole_run(run_file, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("whole") / "out"
    build(run_file, output_dir, *SAVES).run()
    return output_dir


def source(path: Path, kind: str, more: str = "") -> str:
    return f"data.train=[{{path: {path}, format: {kind}{more}}}]"


def test_rows_are_full_and_hold_all_sources(run_file, tmp_path):
    trainer = build(run_file, tmp_path)
    batches = [next(trainer.data) for _ in range(8)]
    assert all(batch["input_ids"].shape == (2, 192) for batch in batches)
    assert np.mean([batch["attention_mask"].mean() for batch in batches]) > 0.99
    assert (np.sum([batch.source_tokens for batch in batches], axis=0) > 0).all()
    visual = [np.isin(batch["input_ids"], range(277, 280)).sum(axis=1) for batch in batches]
    assert 0 < np.max(visual) <= 40


def test_workers_and_a_resumed_run_give_the_same_bits(whole_run, run_file, tmp_path):
    with_workers = tmp_path / "workers"
    build(run_file, with_workers, *SAVES, "data.num_workers=2").run()
    assert_same_run(whole_run, with_workers)
    resumed = tmp_path / "resumed"
    shutil.copytree(whole_run / "checkpoint-2", resumed / "checkpoint-2")
    shutil.copy(whole_run / "metrics.jsonl", resumed)
    build(run_file, resumed, *SAVES, "train.resume_from_checkpoint=auto").run()
    assert_same_run(whole_run, resumed, begun_anew="sequence_length")
    state = json.loads((resumed / "checkpoint-4" / "trainer_state.json").read_text())
    assert len(state["data"]["lanes"]) == 4


def test_a_start_parses_a_few_documents_of_many(run_file, tmp_path, monkeypatch):
    write_records(tmp_path / "many.jsonl", [{"text": "red " * 3}] * 5000)
    parsed = []
    parse = shard_module.parse_object

    def counted(line, needed):
        parsed.append(line)
        return parse(line, needed)

    monkeypatch.setattr(shard_module, "parse_object", counted)
    build(run_file, tmp_path / "out", source(tmp_path / "many.jsonl", "text", ", weight: 1"))
    # Those that are measured, and the first.
    assert len(parsed) <= 33


@pytest.mark.parametrize("packing", ["true", "false"])
def test_one_source_without_further_settings_trains(run_file, tmp_path, packing):
    settings = [source(run_file.with_name("pages.jsonl"), "interleaved"), "train.max_steps=2"]
    settings += [f"data.packing={packing}", "data.packing_length=null", "data.max_length=64"]
    settings += ["data.max_vision_tokens_per_row=null"]
    texts = run_file.with_name("texts.jsonl")
    settings += [f"data.eval=[{{path: {texts}, format: text}}]", "train.eval_steps=1"]
    trainer = build(run_file, tmp_path, *settings)
    batch = next(trainer.data)
    assert ("cu_seqlens" in batch) is (packing == "true")
    assert batch["input_ids"].shape[1] <= 64
    trainer.run()
    assert [line["eval_loss"] > 0 for line in metrics_of(tmp_path)] == [True, True]


def test_bad_documents_are_named_or_counted(run_file, tmp_path):
    rows = [{"text": "red"}, {"text": 3}, {"text": "blue"}] * 20
    write_records(tmp_path / "bad.jsonl", rows)
    bad = source(tmp_path / "bad.jsonl", "text")
    trainer = build(run_file, tmp_path / "fail", bad)
    with pytest.raises(BadSampleError, match=r"bad.jsonl:\d+: 'text' is of type int"):
        trainer.run()
    build(run_file, tmp_path / "skip", bad, "data.on_bad_sample=skip", "train.max_steps=2").run()
    assert metrics_of(tmp_path / "skip")[-1]["skipped_samples"] > 5


def test_changed_data_are_refused_on_resume(tmp_path):
    run_file = write_corpus_run(tmp_path / "data")
    build(run_file, tmp_path / "out", "train.max_steps=1").run()
    resume = ["train.max_steps=2", "train.resume_from_checkpoint=auto"]
    texts = run_file.with_name("texts.jsonl")
    content = texts.read_bytes()
    texts.write_bytes(content.replace(b"red", b"RED", 1))
    with pytest.raises(
        ValueError,
        match=r"cannot continue in the data: the data files of source texts were changed",
    ):
        build(run_file, tmp_path / "out", *resume)
    # Another time of the same content, as in a copy.
    texts.write_bytes(content)
    build(run_file, tmp_path / "out", *resume).run()
    moved = run_file.with_name("moved") / texts.name
    moved.parent.mkdir()
    texts.rename(moved)
    settings = run_file.read_text()
    run_file.write_text(settings.replace(str(texts), str(moved)))
    resume[0] = "train.max_steps=3"
    build(run_file, tmp_path / "out", *resume).run()
    run_file.write_text(settings.replace(str(texts), str(moved)).replace("3.0", "2.0"))
    with pytest.raises(ValueError, match=r"cannot be continued with another data\.train"):
        build(run_file, tmp_path / "out", *resume)
