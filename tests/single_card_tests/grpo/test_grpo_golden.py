"""Learning from rewards on given answers: TRL's and verl's values, and how a batch is computed."""

import re
from typing import Any

import numpy as np
import pytest

from paddle_vl.families.vlm.grpo.objective import RolloutLoss
from paddle_vl.families.vlm.inputs.rollouts import OLD, Rollout
from paddle_vl.nn import head_loss
from parity import grpo as parity
from parity.grpo_order import generations
from parity.recording import gradients
from tests.support.tiny import GOLDEN

FOLDERS = parity.FOLDERS([GOLDEN / "grpo"])


@pytest.mark.parametrize("case", FOLDERS.cases, ids=lambda case: case.name)
def test_everything_equals_the_reference(case):
    for report in parity.run_cases(FOLDERS, [case], 1.0, "float32"):
        assert report.passed, report.failure_lines()


def batch_of(name: str, **settings: Any) -> tuple[Any, Any, RolloutLoss]:
    """The model of a case, its answers as a batch, and a loss."""
    case = FOLDERS.case(name)
    model = parity.loaded(FOLDERS, case)
    loss = RolloutLoss(parity.settings_of(name, settings, case.meta))
    old = {OLD: case.tensors["old.per_token_logps"]}
    return model, parity.collator_of(model, loss)(parity.rollouts_of(case, name, old)), loss


def test_the_answers_to_a_prompt_share_its_images():
    model, batch, _ = batch_of("mixed_images")
    stored = FOLDERS.case("mixed_images").tensors["in.pixel_values"]
    np.testing.assert_array_equal(batch["pixel_values"], stored)
    tokens = int((batch["input_ids"] == model.config.image_token_id).sum())
    assert tokens == len(batch["visual_gather_indices"]) == 2 * len(stored) // 4


def test_chunks_of_the_head_have_the_gradients_of_the_whole_with_entropy_and_temperature(
    monkeypatch,
):
    model, batch, loss = batch_of("temperature0.7", entropy=0.01)
    runner = parity.runner_of(model, loss)

    def found() -> dict[str, np.ndarray]:
        for _, parameter in model.hf_named_parameters():
            parameter.clear_gradient(False)
        runner.accumulate_gradients([batch], batch.counts)
        return gradients(model)[0]

    wanted, most = found(), []
    logits = model.lm_head._logits
    monkeypatch.setattr(
        model.lm_head,
        "_logits",
        lambda rows, parameters: most.append(rows[0].shape[0]) or logits(rows, parameters),
    )
    monkeypatch.setattr(head_loss, "CHUNK_LOGITS", 4 * model.config.text_config.vocab_size)
    for key, grad in found().items():
        np.testing.assert_allclose(grad, wanted[key], atol=2e-5 * np.abs(wanted[key]).max())
    assert max(most) <= 4


def test_a_micro_batch_of_which_nothing_is_learned_has_a_loss_of_0_with_a_gradient():
    case = FOLDERS.case("masked_truncation")
    model = parity.loaded(FOLDERS, case)
    loss = RolloutLoss(parity.settings_of("grpo", {"loss_type": "grpo"}, case.meta))
    rollouts = [
        Rollout(each.prompt, each.completion_ids, each.advantage, 0 * each.completion_ids)
        for each in parity.rollouts_of(case, "grpo", {})
    ]
    batch: Any = parity.collator_of(model, loss)(rollouts)
    counts = dict(zip(loss.terms, batch.counts, strict=True))
    assert counts["policy_loss"] == 8
    assert counts["entropy"] == counts["clip_ratio/low_min"] == 0
    terms = parity.runner_of(model, loss).accumulate_gradients([batch], batch.counts)
    assert not terms.numpy().any()
    assert gradients(model)[1] == 0.0


def test_a_rank_without_a_batch_adds_nothing():
    model, batch, loss = batch_of("mixed_images", beta=0.04, is_mode="token_mask")
    runner = parity.runner_of(model, loss)
    idle = runner.adapter.idle_batch(model)
    assert idle.counts == (0,) * len(loss.terms)
    terms = runner.accumulate_gradients([idle], batch.counts).numpy()
    assert np.isfinite(terms).all()
    assert not terms.any()
    assert gradients(model)[1] == 0.0


def test_answers_that_cannot_be_learned_are_refused():
    model, _, loss = batch_of("mixed_images")
    collate = parity.collator_of(model, loss)
    prompt = {"input_ids": np.array([1, 2])}
    image = model.config.image_token_id
    for ids, message in (
        ([5, image], "token 1 of answer 0 is the placeholder of an image or video, which stands"),
        ([], "answer 0 has 0 tokens: there must be 1 to 12 (grpo.max_completion_length)"),
        ([5] * 13, "answer 0 has 13 tokens: there must be 1 to 12"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            collate([Rollout(prompt, np.array(ids, np.int64), 1.0)])


def test_prompts_that_fill_no_generation_are_refused():
    with pytest.raises(ValueError, match="data.train has 3 prompts and a generation 4, so that"):
        next(generations(3, 4, 42))
