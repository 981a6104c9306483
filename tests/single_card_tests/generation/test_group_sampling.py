"""Groups of sampled answers to prompts that run once.

Guarantees: answers of a group differ and are those of each alone, whatever runs beside them; their
log-probabilities are those of the whole rows at the sampling temperature; a sampler made after an
update has nothing of the weights before it, not even of images; all memory comes back; placeholders
of images are never drawn, and keep their share in log-probabilities; what does not fit is refused.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_vl.families.vlm.answering.groups import GroupSampler
from paddle_vl.generation.sampling import AnswerRow, Sampling, choose_tokens
from paddle_vl.testing.qwen3_5 import tiny_qwen3_5
from paddle_vl.testing.qwen3_vl import patches, token_rows
from tests.support.tiny import tiny_model

PIXELS, GRID = patches([[1, 4, 4], [1, 2, 4]])
PROMPTS: list[dict[str, np.ndarray]] = [
    {
        "input_ids": token_rows([1, ("image", 4), 2, ("image", 2), 3])[0],
        "pixel_values": PIXELS,
        "image_grid_thw": GRID,
    },
    {"input_ids": token_rows([5, 6, 7, 8, 9])[0]},
    {"input_ids": token_rows([7])[0]},
]
TEMPERATURE = 0.8
SAMPLING = Sampling(
    max_tokens=5, temperature=TEMPERATURE, seed=3, stop_token_ids=(9, 11), logprobs=0,
    logprobs_mode="processed_logprobs",
)  # fmt: skip
MODELS = {"qwen3_vl": tiny_model, "qwen3_5": tiny_qwen3_5}


def sampled(model: Any, max_rows: int = 12, prompts: Any = PROMPTS, size: int = 4):
    media = (model.config.image_token_id, model.config.video_token_id)
    own = replace(SAMPLING, suppress_tokens=media)
    groups = [[replace(own, seed=number)] * size for number in range(len(prompts))]
    return GroupSampler(model, prompts, groups, max_rows).run()


def assert_of_whole_rows(model: Any, answers: Any, prompts: Any = PROMPTS) -> None:
    """Log-probabilities of answers are those of rows of prompt and answer."""
    for prompt, group in zip(prompts, answers, strict=True):
        for each in group:
            ids_L = np.concatenate([prompt["input_ids"], each.ids])
            visual = {key: prompt[key] for key in prompt if key != "input_ids"}
            with paddle.no_grad():
                logits_LV = model(input_ids=ids_L[None], **visual).logits[0]
            of_answer = logits_LV[len(prompt["input_ids"]) - 1 : -1].astype("float32")
            expected = F.log_softmax(of_answer / TEMPERATURE, axis=-1).numpy()
            own = expected[np.arange(len(each.ids)), each.ids]
            np.testing.assert_allclose(each.log_probs, own, atol=3e-5)


@pytest.mark.parametrize("name", MODELS)
def test_answers_of_a_group_differ_and_have_the_log_probabilities_of_whole_rows(name):
    model = MODELS[name]()
    model.eval()
    answers = sampled(model)
    assert all(len({tuple(each.ids) for each in group}) > 1 for group in answers)
    for each in (each for group in answers for each in group):
        assert each.is_truncated == (each.ids[-1] not in SAMPLING.stop_token_ids)
        assert len(each.ids) == 5 or not each.is_truncated
    assert_of_whole_rows(model, answers)


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_does_not_depend_on_what_runs_beside_it(name):
    model = MODELS[name]()
    together, apart = sampled(model), sampled(model, max_rows=4)
    for one, other in zip(together, apart, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)


def test_a_sampler_after_an_update_has_nothing_of_the_weights_before_it():
    model = tiny_model()
    model.eval()
    before = sampled(model)
    with paddle.no_grad():
        for parameter in model.parameters():
            parameter.set_value(parameter + 0.2 * paddle.randn(parameter.shape))
    after = sampled(model)
    assert_of_whole_rows(model, after)
    pairs = zip(before[0], after[0], strict=True)
    assert not all(np.array_equal(a.log_probs, b.log_probs) for a, b in pairs)


def test_images_of_a_group_and_of_equal_prompts_are_encoded_once(monkeypatch):
    model, encoded = tiny_model(), []
    encode = model.encode_items
    monkeypatch.setattr(
        model, "encode_items", lambda *args: encoded.append(len(args[1])) or encode(*args)
    )
    sampled(model, prompts=[PROMPTS[0], PROMPTS[0]])
    assert encoded == [1, 1]


def test_all_memory_comes_back():
    groups = [[SAMPLING] * 3] * len(PROMPTS)
    sampler = GroupSampler(tiny_model(), PROMPTS, groups, 4)
    blocks, rows = sorted(sampler._free_blocks), sorted(sampler._free_rows)
    sampler.run()
    assert (sorted(sampler._free_blocks), sorted(sampler._free_rows)) == (blocks, rows)


def test_a_group_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="4 answers to a prompt do not fit 3 rows"):
        sampled(tiny_model(), max_rows=3)


def test_suppressed_tokens_are_never_drawn_and_keep_their_share_of_the_probability():
    logits_RV = paddle.to_tensor(np.tile([[9.0, 2.0, 1.0, 0.0]], [64, 1]).astype(np.float32))
    sampling = replace(SAMPLING, suppress_tokens=(0,))
    rows = [AnswerRow(sampling, np.array([1]), number) for number in range(64)]
    chosen = choose_tokens(logits_RV, rows)
    assert {each.token_id for each in chosen} == {1, 2, 3}
    scores = np.array([9.0, 2.0, 1.0, 0.0]) / TEMPERATURE
    expected = scores - np.log(np.exp(scores).sum())
    for each in chosen:
        assert each.logprob == pytest.approx(expected[each.token_id], abs=1e-5)


def test_processed_log_probabilities_are_of_the_scores_that_were_drawn_from():
    logits_RV = paddle.to_tensor([[3.0, 2.0, 1.0, 0.0]])
    sampling = replace(SAMPLING, top_k=2, temperature=1.0)
    (chosen,) = choose_tokens(logits_RV, [AnswerRow(sampling, np.array([1]))])
    expected = {0: -np.log1p(np.exp(-1.0)), 1: -1 - np.log1p(np.exp(-1.0))}
    assert chosen.logprob == pytest.approx(expected[chosen.token_id], abs=1e-6)
    raw = replace(sampling, logprobs_mode="raw_logprobs")
    (chosen,) = choose_tokens(logits_RV, [AnswerRow(raw, np.array([1]))])
    scores = np.array([3.0, 2.0, 1.0, 0.0])
    assert chosen.logprob == pytest.approx(
        scores[chosen.token_id] - np.log(np.exp(scores).sum()), abs=1e-6
    )
