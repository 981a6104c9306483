"""Evaluations that generate answers (`train.eval`), and the best of them (`train.best`)."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from PIL import Image
from safetensors.numpy import load_file

from paddle_vl import Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from paddle_vl.config.schema import BestConfig
from paddle_vl.families.vlm.evaluation.scorer import generated_answers
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from paddle_vl.nn.head_loss import head_choices
from paddle_vl.parallel.ranks import ONE_RANK
from paddle_vl.train.best import BestEvaluation
from paddle_vl.train.reporting.writers.base import Start
from paddle_vl.train.reporting.writers.service import ServiceRun
from tests.single_card_tests.train.tiny_run import MODEL, write_tiny_run
from tests.single_card_tests.train.whole_runs import build, evaluated, metrics_of
from tests.support.tiny import tiny_model

core = paddle.base.core
RESUME = "train.resume_from_checkpoint=auto"


@pytest.fixture(scope="module")
def data(run_file) -> Path:
    return run_file.with_name("test.jsonl")


def predictions(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def best_of(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "trainer_state.json").read_text())["best"]


@pytest.mark.parametrize("ema", ["null", "{decay: 0.5}"])
def test_answers_are_those_of_the_saved_model(run_file, data, tmp_path, ema):
    own = tmp_path / "my.py"
    own.write_text("def length(answer, references, row):\n    return len(answer)\n")
    settings = f"{{max_new_tokens: 5, every: 2, metrics: [exact_match, '{own}:length']}}"
    overrides = [*evaluated(data), "train.eval_steps=1", f"train.eval={settings}"]
    build(run_file, tmp_path / "out", *overrides, f"train.ema={ema}", "train.warmup_steps=0").run()
    model = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "out" / "final")
    processor = Qwen3VLProcessor.from_pretrained(tmp_path / "out" / "final")
    dataset = MessagesDataset([data], processor)
    ends = {"eos_token_id": processor.eos_token_ids, "pad_token_id": processor.pad_token_id}
    generation = {"do_sample": False, "max_new_tokens": 5, **ends}
    wanted = [each.answer for each in generated_answers(model, processor, dataset, 3, generation)]
    lines = predictions(tmp_path / "out")
    assert [line["answer"] for line in lines] == wanted
    assert len(set(wanted)) > 1
    scored = [line for line in metrics_of(tmp_path / "out") if "eval_length" in line]
    assert [line["step"] for line in scored] == [2, 4]
    assert scored[-1]["eval_length"] == np.mean([len(each) for each in wanted])
    assert [line["scores"]["length"] for line in lines] == [len(each) for each in wanted]
    assert {"eval_exact_match", "eval_answer_tokens"} <= scored[-1].keys()


def test_answers_make_no_copy_of_the_weights(tmp_path):
    text = MODEL["text_config"] | {"intermediate_size": 2048, "num_hidden_layers": 8}
    run_file = write_tiny_run(tmp_path, model=MODEL | {"text_config": text})
    overrides = [*evaluated(tmp_path / "test.jsonl"), "train.per_device_eval_batch_size=1"]
    trainer = build(run_file, tmp_path / "out", *overrides, "train.eval={max_new_tokens: 3}")
    weights = trainer.runner.model.parameters()
    before = [(id(each), each.data_ptr()) for each in weights]
    peaks = []
    for asks in (False, True):
        held = core.host_memory_stat_current_value("Allocated", 0)
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        assert bool(trainer.evaluate(lambda: None, asks).answers) == asks
        peaks.append(core.host_memory_stat_peak_value("Allocated", 0) - held)
    # A copy, of a layer at a time too, would come to the activations of an evaluation.
    assert peaks[1] - peaks[0] < sum(each.size * 4 for each in weights) / 16
    assert [(id(each), each.data_ptr()) for each in weights] == before


def test_a_model_without_a_number_left_still_chooses_a_token():
    model = tiny_model()
    broken_TD = paddle.full([2, model.config.text_config.hidden_size], float("nan"))
    vocabulary = model.placement.ops.vocabulary
    (token,) = head_choices(model.lm_head, broken_TD, paddle.to_tensor([1]), vocabulary).tolist()
    assert token == model.config.text_config.vocab_size - 1


@pytest.mark.parametrize(
    ("settings", "values", "best", "ends"),
    [
        ({"mode": "min"}, [3.0, 2.0, 2.5, 1.0], [True, True, False, True], None),
        ({"mode": "max"}, [3.0, 2.0, 3.0, 4.0], [True, False, False, True], None),
        ({"mode": "min", "patience": 2}, [3.0, None, 4.0, None, 5.0], [True, *[False] * 4], 4),
        # Better, but not by enough to wait longer.
        ({"mode": "max", "patience": 2, "min_delta": 0.5}, [1.0, 1.25, 1.5], [True] * 3, 2),
        (
            {"mode": "min", "patience": 2},
            [float("nan"), 2.0, 2.0, 3.0],
            [False, True, *[False] * 2],
            3,
        ),
    ],
)
def test_what_is_best_and_when_patience_ends(settings, values, best, ends):
    config = BestConfig(metric="loss", **settings)
    followed, found = BestEvaluation(config), []
    for step, value in enumerate(values):
        assert not followed.is_over
        # As a run that continues.
        state, followed = followed.state, BestEvaluation(config)
        followed.restore(json.loads(json.dumps(state.__dict__)))
        entries = {} if value is None else {"eval_loss": value}
        found.append(followed.add(step, entries, ONE_RANK))
    assert found == best
    assert followed.is_over == (ends is not None)
    last = max((step for step, is_best in enumerate(best) if is_best))
    assert (followed.state.step, followed.state.value) == (last, values[last])


class _Service(ServiceRun):
    package = "standin"

    def _finish(self, error):
        """Nothing to tell."""


def test_a_service_gets_pictures_with_the_boxes_of_answers_once(tmp_path):
    picture = tmp_path / "white.png"
    Image.new("RGB", (200, 100), "white").save(picture)
    # Drawing at the second place as it is would take minutes.
    text = "[500, 500] [700, 700, 99999999999999, 800]"
    answer = {"prompt": "Where?", "expected": "[100, 200, 400, 600]", "answer": text}
    lines = [answer | {"images": [str(picture)]}, answer | {"images": []}]
    logged = []
    writer = _Service(Start(tmp_path), lambda **_: None, lambda image, caption: (image, caption))
    writer.run = SimpleNamespace(log=lambda values, step: logged.append((values, step)))
    writer._last_step = 4
    for step in (4, 5):
        writer.show(step, lines)
    ((values, step),) = logged
    assert ([*values], step) == (["eval/answers"], 5)
    ((image, caption),) = values["eval/answers"]
    assert caption == f"prompt: Where?\nexpected: [100, 200, 400, 600]\nanswer: {text}"
    assert image.getpixel((20, 30)) == (47, 158, 68)
    assert image.getpixel((100, 46)) == (212, 20, 90)
    assert image.getpixel((150, 70)) == (212, 20, 90)
    assert image.getpixel((150, 90)) == (255, 255, 255)


# The loss falls, so that the first evaluation has the most.
WORSE = "train.best={metric: loss, mode: max, load_at_end: true, patience: 2}"


def test_the_best_model_stays_and_a_run_that_continues_ends_the_same(run_file, data, tmp_path):
    overrides = [*evaluated(data), "train.eval_steps=1", "train.save_steps=1", WORSE]
    overrides += ["train.max_steps=9", "train.save_total_limit=1", "logging.logging_steps=2"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    build(run_file, whole, *overrides, "train.ema={decay: 0.5}").run()
    assert sorted(path.name for path in whole.glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-3",
    ]
    assert [line["step"] for line in metrics_of(whole)][-1] == 3
    # Checkpoints have the live weights, final/ the average.
    assert json.loads((whole / "final/manifest.json").read_text())["step"] == 1
    again.mkdir()
    for name in ("final", "checkpoint-1"):
        shutil.copytree(whole / name, again / name)
    build(run_file, again, *overrides, "train.ema={decay: 0.5}", RESUME).run()
    for name in ("checkpoint-3/model.safetensors", "final/model.safetensors"):
        found, wanted = (load_file(folder / name) for folder in (again, whole))
        assert all(np.array_equal(found[key], wanted[key]) for key in wanted)
    states = [best_of(folder / "checkpoint-3") for folder in (again, whole)]
    assert states[0] == states[1] == {**states[0], "step": 1, "misses": 2, "mode": "max"}
    # Once more: the run is over, and final/ is as it was.
    build(run_file, again, *overrides, "train.ema={decay: 0.5}", RESUME).run()
    assert json.loads((again / "final/manifest.json").read_text())["step"] == 1
    shutil.rmtree(again / "final")
    with pytest.raises(ValueError, match=r"step 1, whose model is not in .*load_at_end=false"):
        build(run_file, again, *overrides, "train.ema={decay: 0.5}", RESUME)


def test_a_signal_during_the_questions_is_followed_by_the_same_evaluation(run_file, data, tmp_path):
    overrides = [*evaluated(data), "train.eval={max_new_tokens: 3}"]
    overrides += ["train.best={metric: exact_match, mode: max}"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    build(run_file, whole, *overrides).run()
    trainer = build(run_file, stopped, *overrides)
    evaluate, asked = trainer.evaluate, []

    def interrupted(received, asks):
        def during_the_questions():
            asked.append(asks)
            # The losses of six samples in a batch take two calls.
            if len(asked) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                # A thread looks for signals; the questions may be shorter than its interval.
                while received() is None:
                    time.sleep(0.01)
            return received()

        return evaluate(during_the_questions, asks)

    trainer.evaluate = interrupted
    assert trainer.run() == signal.SIGTERM
    assert not (stopped / "predictions.jsonl").exists()
    assert trainer.step == 2
    build(run_file, stopped, *overrides, RESUME).run()
    evaluations = [
        [{key: v for key, v in line.items() if "eval" in key} for line in metrics_of(folder)]
        for folder in (whole, stopped)
    ]
    assert [each for each in evaluations[0] if each] == [each for each in evaluations[1] if each]
    assert predictions(whole) == predictions(stopped)
    assert best_of(whole / "checkpoint-4") == best_of(stopped / "checkpoint-4")
