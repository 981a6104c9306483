"""Rewards of sampled answers, by name and from a file, and what they must return."""

import re
import time

import numpy as np
import pytest

from paddle_vl.families.vlm.grpo.rewards import Rewards, SampledAnswer
from paddle_vl.families.vlm.grpo.settings import GRPOConfig

FILE = """
import time

def lengths(completions, completion_ids, weight, **others):
    assert completions[0][0]["role"] == "assistant"
    return [len(ids) * w for ids, w in zip(completion_ids, weight)]

def of_prompt(prompts, log_metric, log_extra, trainer_state):
    log_metric("seen", len(prompts))
    log_extra("numbers", list(range(len(prompts))))
    return [None if p[0]["content"] == "free" else 1 for p in prompts]

def returns(value):
    return lambda completions: [value] * len(completions)

text, nan, none = returns("a"), returns(float("nan")), returns(None)

def too_few(completions):
    return [1.0]

def a_number(completions):
    return 1.0

def of_some(completions):
    return [1.0, None] * (len(completions) // 2)

def fails(completions):
    return [1 / len(each[0]["content"]) for each in completions]

def hangs(completions):
    time.sleep(5)

async def later(completions):
    return [1.0]
"""


def answers(texts, references=("7",), **row):
    return [
        SampledAnswer(text, [*range(len(text))], [{"role": "user", "content": "free"}], row,
                      references, 10 + number // 2)
        for number, text in enumerate(texts)
    ]  # fmt: skip


def rewards(*names, base=None, **settings):
    return Rewards(GRPOConfig(rewards=[*names], num_generations=2, **settings), base)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "texts", "references", "row", "wanted"),
    [
        ("exact_match", ["7", "<think>8</think> 7"], ["7"], {}, [1, 1]),
        ("relaxed_accuracy", ["101", "107"], ["100"], {}, [1, 0]),
        ("multiple_choice", ["It is B.", "A"], ["B"], {"options": ["x", "y"]}, [1, 0]),
        ("anls", ["hallo", "x"], ["hello"], {}, [0.8, 0]),
        ("box_iou", ["[0, 0, 10, 10]", "none"], ["[0, 0, 10, 20]"], {}, [0.5, 0]),
        ("pointing", ["(10, 10)", "(900, 900)"], ["[0, 0, 20, 20]"], {}, [1, 0]),
        (r"format:<think>.*</think>\s*\d+", ["<think>a\nb</think> 7", "7"], [], {}, [1, 0]),
    ],
)
def test_rewards_by_name_judge_each_answer(name, texts, references, row, wanted):
    found_SF = rewards(name)(answers(texts, references, **row))
    np.testing.assert_allclose(found_SF[:, 0], wanted, rtol=1e-6)


def test_functions_have_the_signature_of_trl(folder):
    scoring = rewards("mine.py:lengths", "mine.py:of_prompt", "mine.py:none", base=folder)
    assert scoring.names == ["lengths", "of_prompt", "none"]
    found_SF = scoring(answers(["abc", ""], weight=2))
    np.testing.assert_array_equal(found_SF, [[6, np.nan, np.nan], [0, np.nan, np.nan]])
    assert scoring.logged == {"seen": 2}
    assert scoring.columns == {"numbers": [0, 1]}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_few", "reward too_few returned 1 values for 4 answers: it must return one for each"),
        ("a_number", "reward a_number returned 1.0: it must return a list of numbers"),
        ("text", "reward text returned 'a' for row 10 of the data ('12'): it must return a finite"),
        ("nan", "reward nan returned nan for row 10 of the data"),
        ("of_some", "reward of_some returned None for some answers to row 10 of the data"),
        ("fails", "reward fails failed on row 11 of the data (answer 2 of the generation, ''): "
         "ZeroDivisionError: division by zero; mend it, or set grpo.on_reward_error=skip"),
        ("hangs", "TimeoutError: reward hangs takes longer than grpo.reward_timeout_s 0.2"),
    ],
)  # fmt: skip
def test_what_a_function_may_not_do_is_refused_with_the_row(folder, function, message):
    scoring = rewards(f"mine.py:{function}", base=folder, reward_timeout_s=0.2)
    begun = time.monotonic()
    with pytest.raises(ValueError, match=re.escape(message)):
        scoring(answers(["12", "3", "", "4"]))
    assert time.monotonic() - begun < 3


def test_an_answer_that_a_reward_fails_on_has_no_reward_where_it_is_skipped(folder, caplog):
    scoring = rewards("exact_match", "mine.py:fails", base=folder, on_reward_error="skip")
    found_SF = scoring(answers(["7", "77", "", "7"]))
    np.testing.assert_array_equal(found_SF, [[1, 1], [0, 0.5], [np.nan, np.nan], [1, 1]])
    assert "reward fails failed on row 11" in caplog.text


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "grpo.rewards names nothing that scores answers"),
        (["accuracy"], "there is no metric 'accuracy': use one of exact_match"),
        (["box"], "box gives no single number of an answer"),
        (["format:("], "format:( is no pattern"),
        (["mine.py:other"], "has no function 'other'"),
        (["yours.py:text"], "there is no file"),
        (["mine.py:later"], "mine.py:later is async"),
        (["format:a", "format:b"], "two are called the same"),
    ],
)
def test_rewards_that_cannot_be_called_are_refused_at_the_start(folder, names, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rewards(*names, base=folder)


def test_a_metric_needs_a_right_answer():
    with pytest.raises(ValueError, match="row 10 of the data .* no right answer to compare with"):
        rewards("exact_match")(answers(["7", "8"], references=[]))
