"""A guard against forgetting (`train.guard`): scores of named sources of data.eval."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from paddle_vl.checkpoint.manifest import Manifest
from paddle_vl.config.guard_settings import GuardConfig
from paddle_vl.parallel.ranks import ONE_RANK
from paddle_vl.train.guard import Guard
from tests.single_card_tests.train.tiny_run import write_records
from tests.single_card_tests.train.whole_runs import assert_same_run, build, metrics_of

RESUME = "train.resume_from_checkpoint=auto"
KEYS = ["eval_loss", "eval_cer", "eval_cer/text", "eval_teds/tables"]


@pytest.fixture(scope="module")
def guarded(run_file) -> list[str]:
    """Settings of a run that scores two sources; a new metric is the length of answers."""
    folder = run_file.parent
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    write_records(folder / "text.jsonl", rows[:2])
    write_records(folder / "tables.jsonl", rows[2:])
    measure = folder / "measure.py"
    measure.write_text("def length(answer, references, row):\n    return len(answer)\n")
    entries = ", ".join(
        f"{{path: {folder}/{name}.jsonl, name: {name}, metrics: [exact_match, '{measure}:length']}}"
        for name in ("text", "tables")
    )
    return [
        *(f"data.eval=[{entries}]", "train.eval_steps=1", "train.save_steps=1"),
        f"train.eval={{max_new_tokens: 5, metrics: [exact_match, '{measure}:length']}}",
        *("train.max_steps=4", "train.save_total_limit=1"),
    ]


def guard_of(*guards: dict, sources: tuple[str, ...] = ("text", "tables")) -> Guard:
    guard = Guard([GuardConfig(**each) for each in guards])
    guard.check(KEYS, sources)
    return guard


@pytest.mark.parametrize(
    ("guard", "values", "falls"),
    [
        # An error rate rises, a score of tables falls.
        ({"metric": "cer", "max_drop": 0.25}, [0.5, 0.75, 0.25, 1.0], [3]),
        ({"metric": "eval_teds", "max_drop": 0.25}, [0.5, 0.25, 1.0, 0.125], [3]),
        ({"metric": "teds", "max_drop": 0.0, "mode": "min"}, [0.5, 0.5, 0.75], [2]),
        ({"metric": "cer", "max_drop": 9.0}, [0.5, float("nan"), 1.0], [1]),
    ],
)
@pytest.mark.parametrize("action", ["stop", "warn"])
def test_a_score_is_compared_with_the_one_before_the_first_update(
    guard, values, falls, action, caplog
):
    settings = guard | {"action": action}
    key = "eval_cer/text" if guard["metric"] == "cer" else "eval_teds/tables"
    followed, found = guard_of(settings), []
    for step, value in enumerate(values):
        # As a run that continues.
        state, followed = followed.state, guard_of(settings)
        followed.restore(json.loads(json.dumps(state.__dict__)), step)
        assert followed.add(step, {"eval_loss": 1.0}, ONE_RANK) == (None, {})
        holds, drops = followed.add(step, {key: value}, ONE_RANK)
        found += [step] * (not holds)
        assert followed.is_over == (not holds and action == "stop")
        if value == value:
            sign = -1 if guard["metric"] == "eval_teds" else 1
            assert drops == {key.replace("/", "_drop/"): sign * (value - values[0])}
    assert found == falls
    last = next(step for step in reversed(range(len(values))) if step not in falls)
    assert followed.state.step == last
    assert ("the run ends" if action == "stop" else "the run goes on") in caplog.text
    # With more room the run that has stopped goes on, unless the score is no number.
    wider = guard_of(settings | {"max_drop": 10.0})
    wider.restore(followed.state.__dict__, len(values))
    assert not wider.is_over


def test_several_guards_and_sources_decide_together():
    own = {"metric": "teds", "max_drop": 0.1, "sources": ["tables"], "action": "warn"}
    guard = guard_of({"metric": "cer", "max_drop": 0.1}, own)
    assert guard.add(0, {"eval_cer/text": 0.1, "eval_teds/tables": 0.9}, ONE_RANK)[0]
    assert guard.add(1, {"eval_cer/text": 0.1}, ONE_RANK) == (None, {})
    holds, _ = guard.add(1, {"eval_cer/text": 0.1, "eval_teds/tables": 0.5}, ONE_RANK)
    assert (holds, guard.is_over) == (False, False)
    guard.add(2, {"eval_cer/text": 0.9, "eval_teds/tables": 0.9}, ONE_RANK)
    assert guard.is_over


def test_a_guard_without_a_score_to_compare_with_is_refused():
    with pytest.raises(ValueError, match="no evaluation of this run gives eval_wer/SOURCE: give"):
        guard_of({"metric": "wer", "max_drop": 0.1})
    with pytest.raises(ValueError, match="gives eval_cer/seals: .*there are eval_cer/text, eval_t"):
        guard_of({"metric": "cer", "max_drop": 0.1, "sources": ["seals"]})
    with pytest.raises(ValueError, match=r"asked is of seals: raise train\.eval\.num_samples"):
        guard_of({"metric": "cer", "max_drop": 0.1}, sources=("text", "seals"))
    guard = guard_of({"metric": "cer", "max_drop": 0.1})
    with pytest.raises(ValueError, match="trained 3 steps without taking eval_cer/text: start it"):
        guard.restore(None, 3)
    with pytest.raises(RuntimeError, match="eval_cer/text is not finite before the first update"):
        guard.add(0, {"eval_cer/text": float("nan")}, ONE_RANK)


def step_of_final(folder: Path) -> int | None:
    manifest = Manifest.read(folder / "final")
    return manifest and manifest.step


def test_a_fall_ends_the_run_with_the_model_before_it(run_file, guarded, tmp_path):
    guard = "train.guard={metric: length, max_drop: 1.0, sources: [text]}"
    settings = [*guarded, "train.max_steps=6", guard]
    whole, again = tmp_path / "whole", tmp_path / "again"
    build(run_file, whole, *settings).run()
    lines = metrics_of(whole)
    drops = [line["eval_length_drop/text"] for line in lines]
    assert lines[-1]["step"] == len(lines) - 1 < 6
    assert max(drops[:-1]) <= 1 < drops[-1]
    assert step_of_final(whole) == len(lines) - 2
    # It stays over, unless more is allowed.
    build(run_file, whole, *settings, RESUME).run()
    assert (len(metrics_of(whole)), step_of_final(whole)) == (len(lines), len(lines) - 2)
    more = "train.guard={metric: length, max_drop: 9.0, sources: [text]}"
    build(run_file, whole, *settings, more, RESUME).run()
    assert step_of_final(whole) == 6
    build(run_file, again, *settings, "train.max_steps=2").run()
    shutil.rmtree(again / "final")
    with pytest.raises(ValueError, match=r"step 2, whose model is not in .*action=warn"):
        build(run_file, again, *settings, RESUME)


def test_a_guarded_run_continues_as_it_would_have_gone_on(run_file, guarded, tmp_path):
    settings = [
        *guarded,
        "train.guard={metric: length, max_drop: 1.0, sources: [text], action: warn}",
    ]
    whole, again = tmp_path / "whole", tmp_path / "again"
    build(run_file, whole, *settings, "train.save_total_limit=9").run()
    assert step_of_final(whole) == 4
    again.mkdir()
    shutil.copytree(whole / "checkpoint-1", again / "checkpoint-1")
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (again / "metrics.jsonl").write_text("".join(lines[:2]))
    build(run_file, again, *settings, "train.save_total_limit=9", RESUME).run()
    assert_same_run(whole, again)


def test_a_fallen_evaluation_is_not_the_best(run_file, guarded, tmp_path):
    # Shorter answers are better, and forbidden.
    settings = [
        *(*guarded, "train.max_steps=6"),
        "train.guard={metric: length, max_drop: 1.0, sources: [text]}",
        "train.best={metric: length, mode: min}",
    ]
    build(run_file, tmp_path, *settings).run()
    assert step_of_final(tmp_path) == 0
    last = metrics_of(tmp_path)[-1]["step"]
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-0", f"checkpoint-{last}"]


def test_a_signal_before_the_first_update_puts_the_baseline_off(run_file, guarded, tmp_path):
    settings = [*guarded, "train.guard={metric: length, max_drop: 9.0}", "train.ema={decay: 0.5}"]
    trainer = build(run_file, tmp_path, *settings)
    evaluate = trainer.evaluate
    assert evaluate is not None

    def interrupted(received, asks):
        os.kill(os.getpid(), signal.SIGTERM)
        # A thread looks for signals.
        while received() is None:
            time.sleep(0.01)
        return evaluate(received, asks)

    trainer.evaluate = interrupted
    assert (trainer.run(), trainer.step) == (signal.SIGTERM, 0)
    build(run_file, tmp_path, *settings, RESUME).run()
    assert [line["step"] for line in metrics_of(tmp_path)] == [0, 1, 2, 3, 4]
    assert step_of_final(tmp_path) == 4


def test_a_mixture_for_training_leaves_every_source_its_questions(run_file, tmp_path, guarded):
    """Of an interleaved data.eval every second row would be of one source."""
    rows = (run_file.parent / "tables.jsonl").read_text().splitlines(keepends=True)
    (run_file.parent / "tables.jsonl").write_text("".join(rows[: len(rows) // 2 * 2]))
    mixed = (
        *("data.mix_strategy=interleave_over", "train.eval={max_new_tokens: 1, num_samples: 2}"),
        "train.best={metric: exact_match/tables, mode: max}",
    )
    best = build(run_file, tmp_path, *guarded, *mixed).best
    # Refused where no question of that source is asked.
    assert best is not None
    assert best.config.key == "eval_exact_match/tables"
