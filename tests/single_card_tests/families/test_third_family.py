"""A family outside the package, the captioner of `tests.support.captioner`."""

from pathlib import Path

import pytest

import tests.support.captioner  # noqa: F401 - registers the family
from paddle_vl.cli.main import main
from paddle_vl.config.families import FamilyEntry, families, family_of, register_family
from tests.support.captioner.run import train_captioner, write_captioner_run
from tests.support.finished_runs import metrics_of


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_captioner_run(tmp_path_factory.mktemp("captioner"))


@pytest.fixture(scope="module")
def learned(run_file, tmp_path_factory) -> Path:
    overrides = ("train.max_steps=40", "train.save_steps=null", "train.eval_steps=40")
    return train_captioner(run_file, tmp_path_factory.mktemp("whole") / "out", *overrides)


def test_it_learns_its_captions_and_gives_them(run_file, learned, capsys):
    lines = metrics_of(learned)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.3 * losses[0]
    assert lines[-1]["eval_loss"] < 0.3 * losses[0]
    assert lines[0]["target_tokens"] > 0
    question = ["--image", str(next((run_file.parent / "images").iterdir())), "--prompt", "Which?"]
    assert main(["generate", "--model", str(learned / "final"), *question]) == 0
    assert capsys.readouterr().out.strip() in ("red", "green", "blue", "yes")


def test_the_command_tells_the_trainers_evaluation_loss(run_file, learned, capsys):
    data = str(run_file.with_name("test.jsonl"))
    assert main(["evaluate", str(learned), "--data", data, "--batch-size", "3"]) == 0
    loss = capsys.readouterr().out.splitlines()[0]
    expected = metrics_of(learned)[-1]["eval_loss"]
    assert f"loss per answer token: {expected:.4f}" in loss


def test_what_it_does_not_have_is_refused(learned, tmp_path, capsys):
    arguments = ["export", "--model", str(learned / "final"), "--output", str(tmp_path / "out")]
    assert main(arguments) == 1
    assert "family captioner cannot be exported yet" in capsys.readouterr().err


def test_a_model_type_belongs_to_one_family():
    entry = family_of({"model_type": "captioner"})
    assert (entry.name, families()[-1]) == ("captioner", entry)
    with pytest.raises(ValueError, match="captioner of family other is registered for family"):
        register_family(FamilyEntry("other", ("captioner",), entry.settings, entry.recipe))
    assert len(families()) == 7
