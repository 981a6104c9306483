"""Rules on next-token scores, and sampling.

Values of the rules are those of transformers 5.23, computed there and copied.
"""

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_vl.generation.sampling import (
    AnswerRow,
    Sampling,
    choose_tokens,
    draw_tokens,
    penalized,
    shaped,
)

OUT = -np.inf
SCORES = [
    [2.0, -1.0, 0.5, 3.0, 0.25, -0.5, 1.5, 0.0],
    [0.0, 1.0, -2.0, 0.75, 2.5, 2.25, -0.25, 1.25],
]
PROMPT = np.array([[7, 3, 1, 3], [6, 6, 4, 2]])
IS_REAL = np.array([[1, 1, 1, 1], [0, 0, 1, 1]], dtype=bool)
ENDING: dict[str, Any] = {"min_tokens": 1, "stop_token_ids": (3, 4)}


def rows_of(prompts: Any, **settings: Any) -> list[AnswerRow]:
    sampling = Sampling(**({"max_tokens": 9} | settings))
    return [AnswerRow(sampling, ids_L, number) for number, ids_L in enumerate(prompts)]


def prompts() -> list[np.ndarray]:
    return [ids_L[mask_L] for ids_L, mask_L in zip(PROMPT, IS_REAL, strict=True)]


def ruled(scores: Any = SCORES, rows: list[AnswerRow] | None = None, **settings) -> np.ndarray:
    """Scores after all rules."""
    rows = rows or rows_of(prompts(), **settings)
    scores_RV = penalized(paddle.to_tensor(scores, dtype="float32"), rows)
    return shaped(scores_RV, [row.sampling for row in rows]).numpy()


def tokens(scores: Any, rows: list[AnswerRow]) -> list[int]:
    scores = scores if isinstance(scores, paddle.Tensor) else paddle.to_tensor(scores)
    return [choice.token_id for choice in choose_tokens(scores, rows)]


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
    np.testing.assert_allclose(ruled(**settings), np.array(wanted, dtype=np.float32), rtol=1e-6)


def test_without_sampling_only_penalty_and_ending_tokens_apply():
    settings = {"temperature": 0.0, "top_k": 1, "top_p": 0.1, **ENDING}
    rows = rows_of(prompts(), **settings, repetition_penalty=1.6)
    # 3 and 4 would end; after the penalty 1 is 1 and 2 is -3.2 in the second.
    assert tokens(SCORES, rows) == [0, 5]


def test_scores_equal_to_the_kth_stay():
    found = ruled([[1.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]] * 2, top_k=2)
    assert np.isfinite(found[0]).tolist() == [False, True, True, True] + [False] * 4


def test_a_chosen_token_is_seen_and_counts_towards_the_least_length():
    penalty: dict[str, Any] = {"repetition_penalty": 2.0}
    after = rows_of(prompts(), **penalty, min_tokens=1, stop_token_ids=(0,))
    assert ruled(rows=after)[0, 0] == OUT
    for row, token in zip(after, (0, 5), strict=True):
        row.append(token)
    wanted = ruled(**penalty)
    wanted[0, 0], wanted[1, 5] = 2.0 / 2, 2.25 / 2
    np.testing.assert_array_equal(ruled(rows=after), wanted)


def test_tokens_come_as_often_as_their_probability_says():
    probabilities = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    with np.errstate(divide="ignore"):
        scores = paddle.to_tensor(np.log(np.tile(probabilities, (8, 1))).astype(np.float32))
    rows = rows_of([[0]] * 8, seed=0)
    drawn = np.concatenate([tokens(scores, rows) for _ in range(500)])
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
        own = rows_of([[0]] * rows, seed=seed)
        return np.stack([tokens(paddle.zeros([rows, 1 << 20]), own) for _ in range(3)], axis=1)

    np.testing.assert_array_equal(numbers(4, 2), numbers(4, 5)[:2])
    assert len(np.unique(numbers(4, 5))) == 15
    assert not (numbers(4, 2) == numbers(5, 2)).any()
    assert not (numbers(None, 2) == numbers(None, 2)).any()


def scores_of(*rows: list[float]) -> paddle.Tensor:
    return paddle.to_tensor(np.array(rows, dtype=np.float32))


def test_penalties_are_those_of_the_answer_and_repetition_also_of_the_prompt():
    settings: dict[str, Any] = {
        "repetition_penalty": 2.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    row = AnswerRow(Sampling(9, temperature=0.0, logprobs=4, **settings), np.array([0, 0, 3]))
    for token in (1, 2, 2):
        row.append(token)
    penalties = {int(t): (d, m) for t, d, m in row.penalties(6).T}
    assert penalties == {0: (2.0, 0.0), 3: (2.0, 0.0), 1: (2.0, 0.75), 2: (2.0, 1.0)}
    # 8 / 2; 6 / 2 - 0.75; 9 / 2 - 1; -1 * 2; and 3.6 of a token that nobody has seen.
    scores = scores_of([8.0, 6.0, 9.0, -1.0, 3.6], [8.0, 6.0, 9.0, -1.0, 3.6])
    plain = AnswerRow(Sampling(9, temperature=0.0), np.array([2]))
    first, second = choose_tokens(scores, [row, plain])
    assert (first.token_id, second.token_id) == (0, 2)
    masks = [np.array([False, True, True, True, True]), None]
    assert [c.token_id for c in choose_tokens(scores, [row, plain], masks)] == [4, 2]


def test_rules_of_rows_do_not_mix():
    """Tokens of probability 1/2, 1/4, 1/8, 1/16, 1/16, drawn many times by rows of each setting."""
    logits = np.log([0.5, 0.25, 0.125, 0.0625, 0.0625])
    cases = [
        ({"top_k": 2}, {0, 1}), ({"top_p": 0.8}, {0, 1, 2}), ({"min_p": 0.25}, {0, 1, 2}),
        ({}, {0, 1, 2, 3, 4}), ({"temperature": 0.0}, {0}), ({"temperature": 0.01}, {0}),
    ]  # fmt: skip
    settings = [Sampling(1, seed=seed, **case) for case, _ in cases for seed in range(60)]
    rows = [AnswerRow(each, np.array([0])) for each in settings]
    scores = scores_of(*[logits] * len(rows))
    found = [c.token_id for c in choose_tokens(scores, rows)]
    for number, (_, wanted) in enumerate(cases):
        assert set(found[60 * number : 60 * (number + 1)]) == wanted


@pytest.mark.parametrize("are_equal", [False, True])
def test_a_row_draws_alike_from_few_candidates_and_from_all(are_equal):
    """A row with top_k alone is drawn from candidates, beside one without from all tokens; also
    where more scores equal the k-th highest than there are candidates."""
    found = np.random.default_rng(0).normal(size=(40, 600)).astype(np.float32)
    scores = paddle.to_tensor(np.minimum(found, 0.5) if are_equal else found)
    settings = [Sampling(1, top_k=30, top_p=0.9, seed=seed) for seed in range(39)]

    def drawn(*last: Sampling) -> list[int]:
        rows = [AnswerRow(each, np.array([0])) for each in [*settings, *last]]
        return [c.token_id for c in choose_tokens(scores, rows)]

    assert drawn() == drawn(Sampling(1, seed=1))[:39]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0: it must be at least 1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0: it must be from 1e-38 to 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_out_of_range_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**({"max_tokens": 1} | given))
