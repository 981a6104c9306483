"""The training loss of each source of a mix or mixture, in runs and over checkpoints.

The loss and the gradient have the same bits with sources and without.
"""

import json
from collections import defaultdict

import numpy as np
import paddle
import pytest
import yaml

from paddle_vl.families.vlm.inputs.collate import (
    TokenSpan,
    VLCollator,
    prepared,
    sources_of_tokens,
    with_label_sources,
)
from paddle_vl.families.vlm.training.objective import VLLoss
from paddle_vl.nn import head_loss
from paddle_vl.train.reporting.metrics import StepMeter
from paddle_vl.train.reporting.reporter import by_rank
from paddle_vl.train.step import ModelRunner, StepOutcome, StepTotals, agree_on_step, leave_step
from tests.single_card_tests.train.batches import (
    assert_same_bits,
    image_fields,
    vl_runner,
)
from tests.single_card_tests.train.corpus_run import write_corpus_run
from tests.single_card_tests.train.test_step import PROMPTS, TEXTS, OfTwo
from tests.single_card_tests.train.tiny_run import write_records, write_tiny_run
from tests.single_card_tests.train.whole_runs import build
from tests.support.finished_runs import metrics_of
from tests.support.tiny import tiny_model

RUN = ["train.max_steps=5", "logging.logging_steps=2", "train.save_steps=null",
       "train.eval_steps=null"]  # fmt: skip


def of_three(batch: dict) -> dict:
    """A batch of three samples, the first and the last of source 2 of 3, the other of source 0."""
    lengths = batch["attention_mask"].sum(axis=1).tolist()
    rows = [[TokenSpan(length, source)] for length, source in zip(lengths, (2, 0, 2), strict=True)]
    return with_label_sources(batch, rows, 3)


@pytest.mark.parametrize("rows_per_chunk", [100, 3])
@pytest.mark.parametrize("has_weights", [False, True], ids=["plain", "factors"])
def test_sources_change_no_bit_of_loss_and_gradient(has_weights, rows_per_chunk, monkeypatch):
    batch, found = image_fields(TEXTS, PROMPTS), []
    if has_weights:
        weights = np.linspace(0.25, 2, batch["labels"].size, dtype=np.float32)
        batch["loss_weights"] = weights.reshape(batch["labels"].shape)
    model = tiny_model()
    monkeypatch.setattr(
        head_loss, "CHUNK_LOGITS", rows_per_chunk * model.config.text_config.vocab_size
    )
    for given, num_sources in ((batch, 0), (of_three(batch), 3)):
        for parameter in model.parameters():
            parameter.clear_gradient(False)
        runner = vl_runner(model)
        terms = runner.accumulate_gradients([prepared(given)], [8], None, num_sources).numpy()
        gradients = {n: p.grad.numpy() for n, p in model.hf_named_parameters()}
        found.append((terms, gradients))
    (plain, wanted), (terms, gradients) = found
    assert (plain.size, terms.size) == (1, 4)
    assert terms[0] == plain[0]
    assert_same_bits(gradients, wanted)
    # By the logits of all rows.
    whole = model(**{k: v for k, v in batch.items() if k != "loss_weights"})
    labels = paddle.to_tensor(batch["labels"][:, 1:])
    losses = paddle.nn.functional.cross_entropy(whole.logits[:, :-1], labels, reduction="none")
    by_row = losses.squeeze(-1).sum(axis=1).numpy()
    np.testing.assert_allclose(terms[1:], [by_row[1], 0, by_row[0] + by_row[2]], rtol=1e-5)


def literal_losses(monkeypatch) -> list[dict[int, tuple[float, int]]]:
    """Of every step sums and counts by source number: the model's own loss of the labels of one
    source, computed before the step."""
    steps, accumulate = [], ModelRunner.accumulate_gradients

    def watched(self, batches, totals, *others):
        step = defaultdict(lambda: np.zeros(2))
        for batch in batches:
            for source in range(batch["num_sources"]):
                rows, targets = np.array(batch["target_rows"])
                targets = np.where(np.array(batch["target_sources"]) == source, targets, -100)
                kept = {k: v for k, v in batch.items() if "target" not in k}
                with paddle.no_grad():
                    output = self.model(**kept, target_rows=np.stack([rows, targets]))
                number = np.count_nonzero(targets != -100)
                step[source] += [float(output.loss_sum) if number else 0.0, number]
        steps.append(dict(step))
        return accumulate(self, batches, totals, *others)

    monkeypatch.setattr(ModelRunner, "accumulate_gradients", watched)
    return steps


def mixture(folder, packing: str):
    """Settings of a mixture of two files of rows, one of them named and drawn twice."""
    run_file = write_tiny_run(folder)
    (folder / "few").mkdir()
    write_records(
        folder / "few" / "rows.jsonl",
        [{"messages": [{"role": "user", "content": "red?"}, {"role": "assistant", "content": w}]}
         for w in ("yes", "blue green", "red")],
    )  # fmt: skip
    entries = [
        {"path": str(folder / "train.jsonl"), "name": "colours", "ratio": 1.0},
        {"path": str(folder / "few" / "rows.jsonl"), "name": "texts", "ratio": 2.0},
        {"path": str(folder / "train.jsonl"), "name": "colours", "num_samples": 3},
    ]
    settings = yaml.safe_load(run_file.read_text())
    settings["data"] |= {"train": entries, "packing": packing == "packed"}
    settings["train"]["per_device_train_batch_size"] = 1
    run_file.write_text(yaml.safe_dump(settings))
    return run_file, ("colours", "texts")


def mix(folder, packing: str):
    """Settings of a pretraining mix with loss weights."""
    run_file = write_corpus_run(folder)
    text = run_file.read_text()
    text = text.replace("format: image_text", "format: image_text\n    loss_weight: 0.25")
    assert "loss_weight" in text
    if packing == "padded":
        text = text.replace("packing: true", "packing: false")
        text = text.replace("packing_length: 192", "packing_length: null")
        text = text.replace("max_vision_tokens_per_row: 40", "max_vision_tokens_per_row: null")
    run_file.write_text(text)
    return run_file, ("texts", "captions", "pages", "chats")


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("write", [mixture, mix])
def test_a_run_reports_the_loss_of_each_source(write, packing, tmp_path, monkeypatch):
    run_file, names = write(tmp_path / "data", packing)
    if packing == "padded":
        run_file.write_text(run_file.read_text().replace("data:", "data:\n  padding_side: left", 1))
    trainer = build(run_file, tmp_path / "out", *RUN)
    steps = literal_losses(monkeypatch)
    trainer.run()
    lines = metrics_of(tmp_path / "out")
    assert [line["step"] for line in lines] == [2, 4, 5]
    seen = set()
    for line, window in zip(lines, (steps[:2], steps[2:4], steps[4:]), strict=True):
        targets = 0
        for number, name in enumerate(names):
            total, count = sum(step[number] for step in window)
            targets += count
            assert (f"loss/{name}" in line) == (count > 0)
            if count:
                assert line[f"loss/{name}"] == pytest.approx(total / count, rel=1e-5)
                seen.add(name)
        counts = [line["target_tokens"] for line in lines[: lines.index(line) + 1]]
        assert targets == counts[-1] - (counts[-2] if len(counts) > 1 else 0)
    assert seen == set(names)


def test_packed_pieces_give_their_targets_to_their_own_source():
    """Of left-padded rows too; the first token of a row has no prediction."""
    mask = np.array([[0, 1, 1, 1], [1, 1, 0, 0]])
    rows = [[TokenSpan(1, 1), TokenSpan(2, 0)], [TokenSpan(2, 2)]]
    np.testing.assert_array_equal(sources_of_tokens(mask, rows), [[0, 1, 0, 0], [2, 2, 0, 0]])
    empty = sources_of_tokens(mask[:, 2:], [[TokenSpan(2, 1)], []])
    np.testing.assert_array_equal(empty, [[1, 1], [0, 0]])
    samples = [
        {"input_ids": np.arange(n), "labels": np.array(labels)}
        for n, labels in ((3, [5, -100, 6]), (2, [7, 8]))
    ]
    batch = VLCollator(0, 97, 98, padding_side="left")(samples)
    batch = with_label_sources(batch, [[TokenSpan(1, 1), TokenSpan(2, 0)], [TokenSpan(2, 2)]], 4)
    # The 7 follows padding, whose row predicts it as any other label.
    assert batch["source_targets"] == (1, 0, 2, 0)
    found = prepared(batch)
    assert dict(zip(found["target_rows"][1].tolist(), found["target_sources"].tolist(),
                    strict=True)) == {6: 0, 7: 2, 8: 2}  # fmt: skip


def outcome_of(loss, targets, sums, is_good=True):
    totals = StepTotals((sum(targets),), 2, 9, 0, (), source_targets=targets)
    values = (paddle.to_tensor(value) for value in ([loss], 1.0, is_good))
    return StepOutcome(*values, totals, paddle.to_tensor(sums))


def line_of(meter):
    own = meter.values(counts_data=True)
    row = [v.numpy().reshape([-1]) if isinstance(v, paddle.Tensor) else [v] for v in own.values()]
    return meter.line(by_rank(np.concatenate(row)[None].astype(np.float64), own))


def test_a_window_survives_checkpoints_of_now_and_of_before():
    def made(names=("a", "b", "c")):
        return StepMeter(VLLoss(), sources=names)

    meter = made()
    meter.add(outcome_of(2.0, (3, 1, 0), [6.0, 2.0, 0.0]), [], 1.0)
    meter.add(outcome_of(float("nan"), (3, 1, 9), [float("nan"), 2.0, 3.0], False), [], 1.0)
    state = json.loads(json.dumps(meter.state_dict()))
    old = {name: value for name, value in state.items() if name != "sources"}
    # What earlier versions read and write.
    assert (old["counted"], old["window"]) == ([4.0], [[8.0], [4.0]])
    same, before, other = made(), made(), made(("a", "b", "d"))
    same.load_state_dict(state)
    before.load_state_dict(old)
    other.load_state_dict(state)
    plain = StepMeter(VLLoss())
    plain.load_state_dict(state)
    assert plain.state_dict() == old
    for each in (meter, same, before, other):
        each.add(outcome_of(1.0, (1, 0, 0), [4.0, 0.0, 0.0]), [], 1.0)
    lines = [line_of(each) for each in (meter, same, before, other)]
    assert [line["loss"] for line in lines] == [9 / 5] * 4
    losses = [{k: v for k, v in line.items() if k.startswith("loss/")} for line in lines]
    assert losses == [{"loss/a": 2.5, "loss/b": 2.0}] * 2 + [{"loss/a": 4.0}] * 2
    assert line_of(meter)["loss"] is None


def test_ranks_exchange_the_targets_of_sources():
    ranks, made = OfTwo(), prepared(of_three(image_fields(TEXTS, PROMPTS)))
    totals = agree_on_step([made, made], VLLoss(), ranks)
    assert totals.source_targets == tuple(4 * n for n in made.source_targets)
    assert made.source_targets[1] == 0
    assert sum(made.source_targets) == made.counts[0]
    leave_step(totals.num_agreed, ranks, 15)
    assert len(ranks.sent[0]) == len(ranks.sent[1])


def test_data_of_one_source_have_no_loss_of_their_own(tmp_path):
    run_file = write_tiny_run(tmp_path / "data")
    file = tmp_path / "data" / "train.jsonl"
    entries = {
        "plain": f"data.train=[{file}]",
        "row source": f"data.train=[{{path: {file}, name: one, ratio: 1.0}}]",
        "corpus": f"data.train=[{{path: {file}, name: one, weight: 1.0}}]",
    }
    for name, setting in entries.items():
        trainer = build(run_file, tmp_path / name, setting)
        batch = next(trainer.data)
        assert (batch.source_targets, batch.target_sources) == ((), None)
        assert list(trainer.data.target_sources) == []
