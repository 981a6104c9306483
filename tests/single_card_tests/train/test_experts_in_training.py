"""Training a model with experts: its auxiliary losses, and the tokens per expert in metrics."""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_vl.families.vlm.training.objective import VLLoss, expert_counts
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.testing import record_host_reads
from paddle_vl.testing.qwen3_vl import EXPERTS
from tests.single_card_tests.train.batches import image_batch, split_batch, vl_runner
from tests.single_card_tests.train.tiny_run import MODEL, write_tiny_run
from tests.single_card_tests.train.whole_runs import build, metrics_of
from tests.support.tiny import tiny_model

TEXTS, PROMPTS = [[1, 2, 3, 4, 5, 9, 9], [6, 7, 8], [3, 3, 3, 3]], [2, 1, 3]
WEIGHT = 0.5
SETTINGS = EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": WEIGHT}
FEW_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "output_router_logits": True,
}  # fmt: skip


class OneOfTwo(SingleRank):
    """A rank that has one of two data shards; the other shard has the same numbers."""

    data_size = 2


@pytest.mark.parametrize("ranks", [ONE_RANK, OneOfTwo()], ids=["alone", "one of two"])
def test_a_steps_loss_has_the_mean_of_the_auxiliary_losses(ranks):
    parts, model, expected = split_batch(TEXTS, PROMPTS), tiny_model(**SETTINGS), 0.0
    targets = 8 * ranks.data_size
    for part in parts:
        output = model(**part)
        share = len(parts) * ranks.data_size
        expected += output.loss_sum / targets + WEIGHT * output.aux_loss / share
    expected.backward()
    wanted = {name: p.grad.numpy() for name, p in model.hf_named_parameters()}
    model = tiny_model(**SETTINGS)
    terms = vl_runner(model, ranks).accumulate_gradients(parts, [targets])
    assert terms.item() == pytest.approx(float(expected), rel=1e-6)
    for name, parameter in model.hf_named_parameters():
        scale = np.abs(wanted[name]).max()
        np.testing.assert_allclose(
            parameter.grad.numpy(), wanted[name], atol=2e-6 * scale, err_msg=name
        )


def test_evaluation_is_about_cross_entropy_alone():
    batch = image_batch(TEXTS, PROMPTS)
    with_auxiliary = vl_runner(tiny_model(**SETTINGS)).loss_sums([batch])
    assert with_auxiliary.item() == vl_runner(tiny_model(**EXPERTS)).loss_sums([batch]).item()


def test_load_is_over_all_experts_of_all_layers_and_parts_of_the_data(monkeypatch):
    model, batch = tiny_model(**EXPERTS), image_batch(TEXTS, PROMPTS)
    model(**batch)
    counts = np.concatenate([count.numpy() for count in model.tokens_per_expert().values()])
    # Two experts per real token in two layers.
    assert counts.sum() == 2 * 2 * batch["attention_mask"].sum()
    own = VLLoss().metric_counts(model)
    assert VLLoss().metrics({name: 2 * count.numpy() for name, count in own.items()}) == {
        "tokens_per_expert_min": 2 * counts.min(),
        "tokens_per_expert_mean": pytest.approx(2 * counts.mean(), abs=0.05),
        "tokens_per_expert_max": 2 * counts.max(),
    }
    assert VLLoss().metric_counts(tiny_model()) == {}
    assert VLLoss().metrics({}) == {}
    # Layers without a count here are left to others.
    count = paddle.to_tensor([5, 1, 2, 3, 4, 9])
    monkeypatch.setattr(model, "tokens_per_expert", lambda: {2: count})
    assert expert_counts(model).tolist() == [[0] * 6, count.tolist()]


def test_a_run_reports_tokens_per_expert_and_padding_is_in_no_count(tmp_path: Path):
    form = MODEL | {"text_config": MODEL["text_config"] | FEW_EXPERTS}
    run_file = write_tiny_run(tmp_path / "data", model=form | {"model_type": "qwen3_vl_moe"})
    runs = []
    for multiple in (1, 32):
        folder = tmp_path / str(multiple)
        with record_host_reads() as reads:
            build(run_file, folder, f"data.pad_to_multiple_of={multiple}").run()
        assert not [place for place in reads if "moe.py" in place]
        runs.append(metrics_of(folder))
    names = [f"tokens_per_expert_{name}" for name in ("min", "mean", "max")]
    for line, padded in zip(*runs, strict=True):
        for key in ("loss", *names):
            assert padded[key] == pytest.approx(line[key], rel=1e-5), key
        low, mean, high = (line[name] for name in names)
        assert 0 <= low <= mean <= high
        assert low < high
    written = json.loads((tmp_path / "1/final/config.json").read_text())
    assert written["model_type"] == "qwen3_vl_moe"
