"""Evaluation.

Guarantees: the loss is one mean over all target tokens for any batching; the model's mode is
restored; the report counts exact answers per task.
"""

import pytest

from paddle_vl.families.vlm.evaluation.scorer import Answer, exact_report
from paddle_vl.train.evaluate import mean_losses
from tests.single_card_tests.train.batches import image_batch, split_batch, vl_runner
from tests.support.tiny import tiny_model

TEXTS, PROMPTS = [[1, 2, 3, 4, 5, 9, 9], [6, 7, 8], [3, 3, 3, 3]], [2, 1, 3]


@pytest.mark.parametrize("training", [True, False])
def test_loss_is_one_mean_over_all_targets(training):
    model = tiny_model()
    expected = float(model(**image_batch(TEXTS, PROMPTS)).loss)
    model.train() if training else model.eval()
    losses = mean_losses(vl_runner(model), split_batch(TEXTS, PROMPTS))
    assert losses.loss == pytest.approx(expected, rel=1e-6)
    assert losses.counts == {"loss": 8}
    assert model.training is training


def test_data_without_targets_is_refused():
    with pytest.raises(ValueError, match="no target token"):
        mean_losses(vl_runner(tiny_model()), [image_batch([[1, 2]], [2])])


def answer(task: str, is_exact: bool) -> Answer:
    return Answer("f:1", task, "p", "a", "a" if is_exact else "b", is_exact)


def test_report_counts_exact_answers_per_task():
    answers = [answer("name", True), answer("add", False), answer("name", False)]
    assert exact_report(answers).splitlines() == [
        "exact answers:",
        "  add            0.00%  (0 of 1)",
        "  name          50.00%  (1 of 2)",
        "  all answers   33.33%  (1 of 3)",
    ]
