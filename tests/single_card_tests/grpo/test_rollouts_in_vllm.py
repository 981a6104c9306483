"""Runs whose answers vLLM samples: its log-probabilities are those of the trained weights after
every update, of a whole model and of an adapter of tower and decoder."""

import shutil

import pytest

from tests.single_card_tests.train.tiny_run import MODEL
from tests.single_card_tests.train.whole_runs import build
from tests.support.finished_runs import metrics_of
from tests.support.sampled_runs import SAMPLED, write_sampled_run
from tests.support.vllm_server import SIZES, needs_vllm, vllm_server

pytestmark = needs_vllm
GAP = "sampling/sampling_logp_difference/max"
# Behind another temperature vLLM's numbers leave out the tokens of images, which are likely without
# training.
STEPS = (
    *("train.max_steps=8", "grpo.num_iterations=1", "grpo.steps_per_generation=2"),
    *("grpo.temperature=1.0", "grpo.max_sampling_logp_difference=9"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    # On the CPU vLLM keeps the old head of a tied model that it reloads.
    text = MODEL["text_config"] | SIZES | {"num_key_value_heads": 2}
    run_file = write_sampled_run(
        tmp_path_factory.mktemp("sampled"),
        MODEL | {"text_config": text, "tie_word_embeddings": False},
    )
    # Every generation has the same prompts.
    prompts = run_file.with_name("train.jsonl")
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:4]))
    shutil.copytree(run_file.with_name("processor"), run_file.with_name("base"), dirs_exist_ok=True)
    return run_file


@pytest.mark.parametrize("name", ["letters", "policy"])
def test_log_probabilities_are_those_of_the_trained_weights(name, data, tmp_path):
    more, served = [], []
    if name == "letters":
        more = ["model.lora={r: 2, target_modules: [all-linear]}", "train.learning_rate=0.5"]
        served = ["--enable-lora", "--max-lora-rank", "8", "--enable-tower-connector-lora"]
    with vllm_server(data.with_name("base"), *served) as address:
        given = f"train.rollout={{endpoint: '{address}', model: {name}}}"
        build(data, tmp_path, *SAMPLED, *STEPS, *more, given).run()
    gaps = [line[GAP] for line in metrics_of(tmp_path)]
    assert len(gaps) == 8
    assert max(gaps) < 1e-3, gaps
