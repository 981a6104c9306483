"""Runs that sample answers and learn from their rewards.

Guarantees: an update with fused and plain kernels is the same; a generation is learned in its parts
and again; a window without a signal updates nothing and is counted; dynamic sampling keeps groups
with a signal alone; answers too far from the trainer's log-probabilities end the run; rewards,
prompts and settings that cannot work are refused before a step, by name.
"""

import json

import numpy as np
import pytest

from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.train.tiny_run import MODEL, MODEL_OCR, write_records
from tests.single_card_tests.train.whole_runs import build
from tests.support.finished_runs import arrays_of, lasting_metrics, metrics_of
from tests.support.sampled_runs import SAMPLED, write_sampled_run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_sampled_run(tmp_path_factory.mktemp("sampled"))


@pytest.mark.parametrize("model", [MODEL, MODEL_OCR], ids=["Qwen3-VL", "PaddleOCR-VL"])
def test_plain_and_fused_kernels_sample_and_learn_the_same(model, data, tmp_path):
    if model is not MODEL:
        data = write_sampled_run(tmp_path, model)
    runs = [tmp_path / name for name in ("fused", "plain")]
    for run in runs:
        build(data, run, *SAMPLED, "train.max_steps=3", f"train.kernels={run.name}").run()
    for one, other in zip(*map(lasting_metrics, runs), strict=True):
        for name in ("reward", "loss", "kl", "completions/mean_length", "grad_norm"):
            # Later updates of a generation tell nothing of its sampling again.
            wanted = other.get(name, 0.0)
            assert one.get(name, 0.0) == pytest.approx(wanted, rel=1e-4, abs=1e-5), name
        for line in (one, other):
            assert line["sampling/sampling_logp_difference/mean"] < 1e-5
    lines = metrics_of(runs[0])
    # Two updates, and both again; the third changes the ratios.
    assert [line["prompts/used"] for line in lines] == [4, 4, 4]
    assert lines[0]["clip_ratio/region_mean"] == 0 < lines[2]["clip_ratio/region_mean"]
    rollouts = [json.loads(line) for line in (runs[0] / "rollouts.jsonl").read_text().splitlines()]
    assert rollouts[0].keys() >= {"prompt", "answer", "images", "scores"}
    assert len(rollouts[0]["answer"].splitlines()) >= 2


def test_a_generation_without_a_signal_updates_nothing_and_is_counted(data, tmp_path):
    same = f"grpo.rewards=[{data.with_name('my_rewards.py')}:same]"
    settings = (
        "grpo.beta=0",
        same,
        "train.max_steps=2",
        "train.save_steps=1",
        "train.warmup_steps=0",
        "train.weight_decay=0.1",
    )
    build(data, tmp_path, *SAMPLED, *settings).run()
    base = arrays_of(data.with_name("base"), ["model"])
    found = arrays_of(tmp_path / "checkpoint-2", ["model"])
    assert all(np.array_equal(found[name], base[name]) for name in base)
    first, last = metrics_of(tmp_path)
    assert (first["frac_reward_zero_std"], last["updates_without_signal"]) == (1.0, 2)
    assert last["loss"] is None


def test_dynamic_sampling_keeps_groups_with_a_signal_alone(data, tmp_path):
    # Of 24 prompts 8 have a signal; a generation has four.
    own = f"grpo.rewards=[{data.with_name('my_rewards.py')}:of_red]"
    settings = ("grpo.dynamic_sample=true", "grpo.max_resample_times=5", "train.max_steps=1", own)
    build(data, tmp_path, *SAMPLED, *settings).run()
    (line,) = metrics_of(tmp_path)
    assert line["frac_reward_zero_std"] == 0 < line["prompts/without_signal"]
    assert line["prompts/used"] == 4 < line["prompts/used"] + line["prompts/dropped"]
    assert (line["prompts/used"] + line["prompts/dropped"]) % 4 == 0


def test_answers_of_other_weights_end_the_run(data, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "paddle_vl.families.vlm.answering.groups.GroupSampler._append",
        staticmethod(
            lambda rows, chosen: [
                (row.answer.append(each.token_id), row.log_probs.append(each.logprob - 0.2))
                for row, each in zip(rows, chosen, strict=True)
            ]
        ),
    )
    with pytest.raises(ValueError, match=r"differ from the trainer's by 0\.2 nats"):
        build(data, tmp_path, *SAMPLED, "train.max_steps=2").run()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["grpo.rewards=[]"], "grpo.rewards names nothing that scores answers"),
        (["grpo.num_generations=3"], "groups of grpo.num_generations 3 do not fill"),
        (["grpo.max_num_seqs=2", "grpo.num_generations=4"], "raise max_num_seqs"),
        (["grpo.outcome_rewards=[x]"], "grpo.outcome_rewards names x, which grpo.rewards has not"),
        (["data.eval=[DATA/test.jsonl]"], "data.eval is set but train.eval is not"),
        (["parallel.schedule=colocated"], "parallel.schedule is colocated with train.objective"),
        (["data.max_length=20"], "leaves no room for grpo.max_completion_length 4"),
        (["train.per_device_train_batch_size=64"], "do not fill one batch"),
    ],
)
def test_what_cannot_be_sampled_or_scored_is_refused_before_the_run(
    data, tmp_path, settings, message
):
    settings = [each.replace("DATA", str(data.parent)) for each in settings]
    with pytest.raises(ValueError, match=message):
        build(data, tmp_path, *SAMPLED, *settings)


def test_a_prompt_that_ends_in_an_answer_is_refused_or_skipped(data, tmp_path):
    rows = [json.loads(line) for line in data.with_name("train.jsonl").read_text().splitlines()]
    answered = {**rows[0], "solution": None}
    answered["messages"] = [*rows[0]["messages"], {"role": "assistant", "content": "red"}]
    file = data.with_name("answered.jsonl")
    write_records(file, [*rows, answered])
    settings = (*SAMPLED, f"data.train=[{file}]")
    with pytest.raises(BadSampleError, match=r"answered\.jsonl:25: the prompt ends in an answer"):
        build(data, tmp_path, *settings)
    trainer = build(data, tmp_path, *settings, "data.on_bad_sample=skip")
    assert trainer.data.skipped == {"ends_in_answer": 1}


def test_an_evaluation_asks_held_out_prompts(data, tmp_path):
    settings = (f"data.eval=[{data.with_name('test.jsonl')}]", "train.max_steps=1")
    asks = "train.eval={max_new_tokens: 3, metrics: [exact_match]}"
    build(data, tmp_path, *SAMPLED, *settings, "train.eval_steps=1", asks).run()
    line = metrics_of(tmp_path)[-1]
    assert 0 <= line["eval_exact_match"] <= 1
    assert "eval_loss" not in line
    answers = (tmp_path / "predictions.jsonl").read_text().splitlines()
    assert [(json.loads(each)["expected"], json.loads(each)["task"]) for each in answers] == [
        (json.loads(each)["solution"], "red")
        for each in data.with_name("test.jsonl").read_text().splitlines()
    ]
