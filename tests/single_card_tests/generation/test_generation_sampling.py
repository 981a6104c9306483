"""Rules on next-token scores, and sampling.

Guarantees: every rule alone, and all together, give the values of transformers 5.23 (computed there
and copied); a prompt's padding does not count as a seen token, a generated token does. Tokens are
drawn with their probabilities and never at probability 0, at both ends of the uniform number; a
prompt's random numbers depend only on the seed and its row.
"""

import numpy as np
import paddle
import pytest

from paddle_vl import GenerationConfig
from paddle_vl.generation.sampling import TokenChoice, draw_tokens

OUT = -np.inf
SCORES = [
    [2.0, -1.0, 0.5, 3.0, 0.25, -0.5, 1.5, 0.0],
    [0.0, 1.0, -2.0, 0.75, 2.5, 2.25, -0.25, 1.25],
]
PROMPT = np.array([[7, 3, 1, 3], [6, 6, 4, 2]])
IS_REAL = np.array([[1, 1, 1, 1], [0, 0, 1, 1]], dtype=bool)
ENDING = {"min_new_tokens": 1, "eos_token_id": [3, 4]}


def choice(size: int, vocab: int, **settings) -> TokenChoice:
    """Of prompts of one token."""
    ids = np.zeros((size, 1), np.int64)
    return TokenChoice(GenerationConfig(**settings), ids, ids == 0, vocab)


def rules(**settings) -> TokenChoice:
    config = GenerationConfig(**{"do_sample": True, "top_k": 0, **settings})
    return TokenChoice(config, PROMPT, IS_REAL, 8)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, SCORES),
        (
            {"repetition_penalty": 1.5},
            [
                [2.0, -1.5, 0.5, 2.0, 0.25, -0.5, 1.5, 0.0],
                [0.0, 1.0, -3.0, 0.75, 1.666667, 2.25, -0.25, 1.25],
            ],
        ),
        (
            ENDING,
            [
                [2.0, -1.0, 0.5, OUT, OUT, -0.5, 1.5, 0.0],
                [0.0, 1.0, -2.0, OUT, OUT, 2.25, -0.25, 1.25],
            ],
        ),
        (
            {"temperature": 0.5},
            [
                [4.0, -2.0, 1.0, 6.0, 0.5, -1.0, 3.0, 0.0],
                [0.0, 2.0, -4.0, 1.5, 5.0, 4.5, -0.5, 2.5],
            ],
        ),
        (
            {"top_k": 3},
            [
                [2.0, OUT, OUT, 3.0, OUT, OUT, 1.5, OUT],
                [OUT, OUT, OUT, OUT, 2.5, 2.25, OUT, 1.25],
            ],
        ),
        ({"top_k": 50}, SCORES),
        (
            {"top_p": 0.8},
            [
                [2.0, OUT, OUT, 3.0, OUT, OUT, 1.5, OUT],
                [OUT, 1.0, OUT, OUT, 2.5, 2.25, OUT, 1.25],
            ],
        ),
        (
            {"top_p": 1e-9},
            [
                [OUT, OUT, OUT, 3.0, OUT, OUT, OUT, OUT],
                [OUT, OUT, OUT, OUT, 2.5, OUT, OUT, OUT],
            ],
        ),
        (
            {"repetition_penalty": 1.5, "temperature": 0.7, "top_k": 5, "top_p": 0.75, **ENDING},
            [
                [2.857143, OUT, OUT, OUT, OUT, OUT, 2.142857, OUT],
                [OUT, OUT, OUT, OUT, OUT, 3.214286, OUT, 1.785714],
            ],
        ),
    ],
)
def test_scores_are_those_of_transformers(settings, wanted):
    found = rules(**settings).scores(paddle.to_tensor(SCORES)).numpy()
    np.testing.assert_allclose(found, np.array(wanted, dtype=np.float32), rtol=1e-6)


def test_without_sampling_only_penalty_and_ending_tokens_apply():
    found = rules(do_sample=False, temperature=0.5, top_k=3, top_p=0.8, **ENDING)
    wanted = rules(**ENDING).scores(paddle.to_tensor(SCORES))
    assert found.scores(paddle.to_tensor(SCORES)).equal_all(wanted)


def test_scores_equal_to_the_kth_stay():
    scores = paddle.to_tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]] * 2)
    found = rules(top_k=2).scores(scores).numpy()
    assert np.isfinite(found[0]).tolist() == [False, True, True, True] + [False] * 4


def test_a_chosen_token_is_seen_and_counts_towards_the_least_length():
    penalty = {"repetition_penalty": 2.0}
    after = rules(**penalty, min_new_tokens=1, eos_token_id=0)
    assert after.scores(paddle.to_tensor(SCORES))[0, 0].item() == OUT
    after.append(paddle.to_tensor([0, 5]))
    found = after.scores(paddle.to_tensor(SCORES)).numpy()
    wanted = rules(**penalty).scores(paddle.to_tensor(SCORES)).numpy()
    wanted[0, 0], wanted[1, 5] = 2.0 / 2, 2.25 / 2
    np.testing.assert_array_equal(found, wanted)


def test_scores_are_float32_whatever_the_logits():
    assert rules().scores(paddle.to_tensor(SCORES, dtype="float64")).dtype == paddle.float32


def test_tokens_come_as_often_as_their_probability_says():
    probabilities = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    with np.errstate(divide="ignore"):
        scores = paddle.to_tensor(np.log(np.tile(probabilities, (8, 1))).astype(np.float32))
    choose = choice(8, 5, do_sample=True, seed=0)
    drawn = np.concatenate([choose(scores).numpy() for _ in range(500)])
    counts = np.bincount(drawn, minlength=5)
    assert counts[1] == 0
    kept = probabilities > 0
    expected = probabilities[kept] * len(drawn)
    # 3 degrees of freedom: one seed in a thousand exceeds 16.3.
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 16.3


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.49, 1), (0.51, 3), (1 - 2**-53, 3)])
def test_the_uniform_number_picks_along_the_vocabulary(uniform, token):
    scores = paddle.to_tensor([[-np.inf, 1.0, -np.inf, 1.0, -np.inf]], dtype="float32")
    found = draw_tokens(scores, paddle.to_tensor([[uniform]], dtype="float64"))
    assert found.tolist() == [token]
    assert found.dtype == paddle.int64


def test_rows_have_streams_of_their_own():
    def numbers(seed, rows):
        """Of equally likely tokens."""
        choose = choice(rows, 1 << 20, do_sample=True, top_k=0, seed=seed)
        return np.stack([choose(paddle.zeros([rows, 1 << 20])).numpy() for _ in range(3)], axis=1)

    np.testing.assert_array_equal(numbers(4, 2), numbers(4, 5)[:2])
    assert len(np.unique(numbers(4, 5))) == 15
    assert not (numbers(4, 2) == numbers(5, 2)).any()
    assert not (numbers(None, 2) == numbers(None, 2)).any()


def test_without_sampling_the_highest_score_is_taken():
    choose = choice(2, 3, seed=3)
    assert choose(paddle.to_tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])).tolist() == [1, 0]
