"""Drawing tokens.

Pinned here: tokens are drawn with their probabilities and never at probability 0, at both ends of
the uniform number; a row's numbers depend on the seed and its own place only.
"""

import numpy as np
import paddle
import pytest

from paddle_vl import GenerationConfig
from paddle_vl.generation.sampling import RowDraws, TokenChoice, draw_tokens


def test_tokens_come_as_often_as_their_probability_says():
    probabilities = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    with np.errstate(divide="ignore"):
        scores = paddle.to_tensor(np.log(np.tile(probabilities, (8, 1))).astype(np.float32))
    choose = TokenChoice(GenerationConfig(do_sample=True, seed=0), 8)
    drawn = np.concatenate([choose(scores).numpy() for _ in range(500)])
    counts = np.bincount(drawn, minlength=5)
    assert counts[1] == 0
    kept = probabilities > 0
    expected = probabilities[kept] * len(drawn)
    # 3 degrees of freedom: above 16.3 once in a thousand seeds.
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 16.3


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.49, 1), (0.51, 3), (1 - 2**-53, 3)])
def test_the_uniform_number_picks_along_the_vocabulary(uniform, token):
    scores = paddle.to_tensor([[-np.inf, 1.0, -np.inf, 1.0, -np.inf]], dtype="float32")
    found = draw_tokens(scores, paddle.to_tensor([[uniform]], dtype="float64"))
    assert found.tolist() == [token]
    assert found.dtype == paddle.int64


def test_rows_have_streams_of_their_own():
    def numbers(seed, rows):
        draws = RowDraws(seed, rows)
        return np.concatenate([draws.next().numpy() for _ in range(3)], axis=1)

    np.testing.assert_array_equal(numbers(4, 2), numbers(4, 5)[:2])
    assert len(np.unique(numbers(4, 5))) == 15
    assert not (numbers(4, 2) == numbers(5, 2)).any()
    assert not (numbers(None, 2) == numbers(None, 2)).any()


def test_without_sampling_the_highest_score_is_taken():
    choose = TokenChoice(GenerationConfig(seed=3), 2)
    assert choose(paddle.to_tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])).tolist() == [1, 0]
