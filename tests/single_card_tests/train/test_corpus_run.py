"""Training on a mix of sources, and what it reports of each. (Losses: `test_source_losses`.)"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from paddle_vl.data.corpus import shard as shard_module
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.base import MeanLosses
from paddle_vl.families.vlm.training.objective import VLLoss
from paddle_vl.report.panels import panels_of
from paddle_vl.report.report import write_report
from paddle_vl.report.runs import read_runs
from paddle_vl.train.evaluate import combined
from tests.single_card_tests.train.corpus_run import write_corpus_run
from tests.single_card_tests.train.tiny_run import write_records
from tests.single_card_tests.train.whole_runs import build, metrics_of
from tests.support.finished_runs import metrics_of as run_metrics

# Documents by source.
DOCUMENTS = {"texts": 40, "captions": 30, "pages": 20, "chats": 12}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_corpus_run(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(run_file, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("whole") / "out"
    held_out = [
        {"path": str(run_file.with_name(f"{name}.jsonl")), "format": kind, "name": name}
        for name, kind in (("texts", "text"), ("captions", "image_text"), ("pages", "interleaved"))
    ]
    build(run_file, output_dir, f"data.eval={json.dumps(held_out)}", "train.eval_steps=4").run()
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


def test_tokens_documents_and_epochs_of_every_source_add_up(finished):
    lines = run_metrics(finished)
    for line in lines:
        assert line["tokens"] == sum(line[f"tokens/{name}"] for name in DOCUMENTS)
        for name, number in DOCUMENTS.items():
            epochs = line[f"documents/{name}"] / number
            assert line[f"epochs/{name}"] == pytest.approx(epochs, abs=1e-4)
        total = sum(line[f"documents/{name}"] for name in DOCUMENTS)
        assert line["epoch"] == pytest.approx(total / sum(DOCUMENTS.values()), abs=1e-4)
    shares = [lines[-1][f"tokens/{name}"] / lines[-1]["tokens"] for name in DOCUMENTS]
    assert shares == pytest.approx([0.5, 1 / 6, 1 / 6, 1 / 6], abs=0.15)
    assert lines[-1]["epochs/texts"] > lines[0]["epochs/texts"] > 0


HELD_OUT = ("texts", "captions", "pages")


def test_held_out_losses_of_sources_and_of_all_tokens(finished):
    line = run_metrics(finished)[-1]
    losses = [line[f"eval_loss/{name}"] for name in HELD_OUT]
    assert min(losses) < line["eval_loss"] < max(losses)
    for end in ("", *(f"/{name}" for name in HELD_OUT)):
        perplexity = math.exp(line[f"eval_loss{end}"])
        assert line[f"eval_perplexity{end}"] == pytest.approx(perplexity)


def test_losses_of_sources_weigh_as_their_target_tokens():
    parts = {
        "a": MeanLosses(1.0, {"loss": 1.0}, {"loss": 30}),
        "b": MeanLosses(3.0, {"loss": 3.0}, {"loss": 10}),
    }
    both = combined(parts, VLLoss())
    assert (both.loss, both.counts, both.by_source) == (1.5, {"loss": 40}, parts)
    alone = MeanLosses(2.0, {"loss": 2.0}, {"loss": 7})
    assert combined({"": alone}, VLLoss()) is alone


def test_the_report_has_a_curve_for_every_source(finished, tmp_path):
    panels = {panel.name: panel for panel in panels_of(read_runs([finished]))}
    labels = {name: {curve.label for curve in panel.curves} for name, panel in panels.items()}
    for name in ("tokens", "documents", "epochs", "perplexity", "loss"):
        for source in HELD_OUT:
            assert any(label.endswith(source) for label in labels[name]), (name, labels[name])
    assert {f"{kind} {s}" for kind in ("training", "evaluation") for s in HELD_OUT} <= labels[
        "loss"
    ]
    assert panels["perplexity"].section == panels["loss"].section
    assert {panels[name].section for name in ("tokens", "documents", "epochs")} == {"Data"}
    page, *_ = write_report([finished], tmp_path, with_pictures=False)
    assert "eval_perplexity/captions" in page.read_text(encoding="utf-8")
