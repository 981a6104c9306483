"""What a run on a mix of sources reports.

Guarantees: metrics.jsonl has tokens, documents and epochs of every source, which add up; held-out
loss and perplexity of every source, and of all together each target token once; the report has
panels with a curve per source. (Training losses of sources: `test_source_losses`.)
"""

import math

import pytest

from paddle_vl.families.base import MeanLosses
from paddle_vl.families.vlm.training.objective import VLLoss
from paddle_vl.report.panels import panels_of
from paddle_vl.report.report import write_report
from paddle_vl.report.runs import read_runs
from paddle_vl.train.evaluate import combined
from tests.single_card_tests.train.whole_runs import build
from tests.support.finished_runs import metrics_of
from tests.support.tiny_mix import write_mix

NAMES = ("text", "captions", "pages")
# The learning rate must not depend on the length.
SHORT = ("train.max_tokens=2500", "train.lr_scheduler_type=constant", "train.decay_ratio=null",
         "train.warmup_ratio=0", "train.save_steps=2")  # fmt: skip


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    return write_mix(tmp_path_factory.mktemp("mix"))


@pytest.fixture(scope="module")
def finished(run_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    build(run_file, folder, *SHORT).run()
    return folder


def test_tokens_documents_and_epochs_of_every_source_add_up(finished):
    lines = metrics_of(finished)
    documents = {"text": 20, "captions": 12, "pages": 9}
    for line in lines:
        assert line["tokens"] == sum(line[f"tokens/{name}"] for name in NAMES)
        for name in NAMES:
            epochs = line[f"documents/{name}"] / documents[name]
            assert line[f"epochs/{name}"] == pytest.approx(epochs, abs=1e-4)
        total = sum(line[f"documents/{name}"] for name in NAMES)
        assert line["epoch"] == pytest.approx(total / 41, abs=1e-4)
    shares = [lines[-1][f"tokens/{name}"] / lines[-1]["tokens"] for name in NAMES]
    assert shares == pytest.approx([0.5, 0.2, 0.3], abs=0.15)
    assert lines[-1]["epochs/text"] > lines[0]["epochs/text"] > 0


def test_held_out_losses_of_sources_and_of_all_tokens(finished):
    line = metrics_of(finished)[-1]
    losses = [line[f"eval_loss/{name}"] for name in NAMES]
    assert min(losses) < line["eval_loss"] < max(losses)
    for end in ("", *(f"/{name}" for name in NAMES)):
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
    for name in ("tokens", "documents", "epochs", "perplexity", "loss"):
        labels = [curve.label for curve in panels[name].curves]
        for source in NAMES:
            assert any(label.endswith(source) for label in labels), (name, labels)
    labels = [curve.label for curve in panels["loss"].curves]
    assert {f"{kind} {source}" for kind in ("training", "evaluation") for source in NAMES} <= {
        *labels
    }
    assert panels["perplexity"].section == panels["loss"].section
    assert {panels[name].section for name in ("tokens", "documents", "epochs")} == {"Data"}
    page, *_ = write_report([finished], tmp_path, with_pictures=False)
    assert "eval_perplexity/captions" in page.read_text(encoding="utf-8")
