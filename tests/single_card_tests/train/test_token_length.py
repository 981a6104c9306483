"""Runs whose length is a number of tokens (train.max_tokens).

Guarantees: the run ends with the step that reaches them and is, step by step, the run of as many
steps with a constant rate; stopped and resumed it ends in the same place with the same bytes; a
checkpoint without a token count is refused.
"""

import json

import pytest

from tests.single_card_tests.train.whole_runs import assert_same_run, build, metrics_of

CONSTANT = ("train.lr_scheduler_type=constant", "train.warmup_steps=0", "train.save_steps=2")


@pytest.fixture(scope="module")
def in_steps(run_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps") / "out"
    build(run_file, folder, *CONSTANT).run()
    return folder


def of_tokens(number: int, schedule=CONSTANT) -> list[str]:
    return ["train.max_steps=null", f"train.max_tokens={number}", *schedule]


def test_the_step_that_reaches_the_tokens_is_the_last(run_file, in_steps, tmp_path):
    tokens = [line["tokens"] for line in metrics_of(in_steps)]
    assert len(tokens) == 4
    assert tokens == sorted(tokens)
    for name, number in (("fewer", tokens[2] + 1), ("exact", tokens[3])):
        build(run_file, tmp_path / name, *of_tokens(number)).run()
        assert_same_run(in_steps, tmp_path / name)
    early = build(run_file, tmp_path / "early", *of_tokens(tokens[2]))
    early.run()
    assert early.step == 3


def test_its_rate_follows_the_tokens(run_file, in_steps, tmp_path):
    tokens = [0, *(line["tokens"] for line in metrics_of(in_steps))]
    schedule = ("train.warmup_steps=0", "train.lr_scheduler_type=warmup_stable_decay",
                "train.decay_ratio=1", "train.decay_type=linear")  # fmt: skip
    build(run_file, tmp_path / "out", *of_tokens(tokens[4], schedule)).run()
    rates = [line["learning_rate"] for line in metrics_of(tmp_path / "out")]
    assert rates == pytest.approx([0.01 * (1 - seen / tokens[4]) for seen in tokens[:4]])


def test_a_resumed_run_ends_with_the_same_bytes(run_file, in_steps, tmp_path):
    tokens = metrics_of(in_steps)[3]["tokens"]
    folder = tmp_path / "out"
    build(run_file, folder, *of_tokens(metrics_of(in_steps)[1]["tokens"])).run()
    longer = build(run_file, folder, *of_tokens(tokens), "train.resume_from_checkpoint=auto")
    assert (longer.step, longer.tokens) == (2, metrics_of(in_steps)[1]["tokens"])
    longer.run()
    assert_same_run(in_steps, folder)


def test_a_checkpoint_that_does_not_know_its_tokens_is_refused(run_file, tmp_path):
    folder = tmp_path / "out"
    build(run_file, folder, *CONSTANT, "train.max_steps=2", "train.verify_checkpoint=false").run()
    file = folder / "checkpoint-2" / "trainer_state.json"
    state = json.loads(file.read_text())
    del state["tokens"]
    # As many bytes as the manifest says.
    file.write_text(json.dumps(state).ljust(file.stat().st_size))
    resume = ("train.resume_from_checkpoint=auto", "train.verify_checkpoint=false")
    with pytest.raises(ValueError, match="does not say how many tokens it has trained on"):
        build(run_file, folder, *of_tokens(10**6), *resume)
    assert build(run_file, folder, *CONSTANT, *resume).tokens == 0
