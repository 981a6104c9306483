"""Training on a mix of sources on several ranks.

Guarantees, under data parallelism with every layer sharded, in a pipeline and under model
parallelism: loss, gradient norm and every parameter equal the run on one device with the same rows,
with loss weights of the sources; a run continues what another topology saved, document by document.
"""

import shutil
from pathlib import Path

import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.corpus_run import write_corpus_run
from tests.support.finished_runs import arrays_of, assert_close, lasting_metrics
from tests.support.launch import launch
from tests.support.tolerance import TOPOLOGY

SETTINGS = ["train.save_steps=2", "data.packing_length=96", "train.learning_rate=0.001"]
SAMPLES = "train.per_device_train_batch_size"
SHARDED = ["parallel.sharding_degree=2", "parallel.sharding_stage=3", f"{SAMPLES}=1"]
TOPOLOGIES = {
    "sharding2 stage 3": SHARDED,
    "pp2": ["parallel.pp_degree=2"],
    "mp2": ["parallel.mp_degree=2"],
}
HEAVY = ("mp2",)


def train(run_file: str, output_dir: str, overrides: list[str]) -> None:
    settings = [f"train.output_dir={output_dir}", *SETTINGS, *overrides]
    with pytest.MonkeyPatch.context() as patch:
        # So that the lanes of a checkpoint continue after it.
        patch.setattr("paddle_vl.data.corpus.loader.PHASES", 2)
        build_trainer(load_run_config(run_file, settings)).run()


def worker(run_file: str, folder: str, overrides: list[str]) -> None:
    """A run, and one that continues what one device saved."""
    train(run_file, f"{folder}/whole", overrides)
    train(run_file, f"{folder}/resumed", [*overrides, "train.resume_from_checkpoint=auto"])


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    run_file = write_corpus_run(tmp_path_factory.mktemp("corpus"))
    text = run_file.read_text(encoding="utf-8")
    # Both loss weights and their default.
    weighted = text.replace("format: image_text", "format: image_text\n    loss_weight: 0.25")
    weighted = weighted.replace("num_key_value_heads: 1", "num_key_value_heads: 2")
    assert weighted.count("loss_weight") == 1
    run_file.write_text(weighted, encoding="utf-8")
    return run_file


@pytest.fixture(scope="module")
def one_device(run_file, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("one") / "out"
    train(str(run_file), str(output_dir), [])
    return output_dir


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.heavy if name in HEAVY else ()) for name in TOPOLOGIES
    ],
)
def several(request, run_file, one_device, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    shutil.copytree(one_device / "checkpoint-2", folder / "resumed" / "checkpoint-2")
    launch(worker, 2, arguments=(str(run_file), str(folder), TOPOLOGIES[request.param]))
    return folder


def test_every_step_and_every_parameter_equal_one_device(several, one_device):
    wanted = lasting_metrics(one_device)
    for found, lines in (("whole", wanted), ("resumed", wanted[2:])):
        for one, other in zip(lines, lasting_metrics(several / found), strict=True):
            for key in ("step", "loss", "grad_norm", "target_tokens"):
                assert other[key] == pytest.approx(one[key], rel=TOPOLOGY), (one["step"], key)
        assert_close(
            arrays_of(several / found / "checkpoint-4"), arrays_of(one_device / "checkpoint-4")
        )


def test_one_device_continues_what_two_ranks_saved(several, one_device, run_file, tmp_path):
    shutil.copytree(several / "whole" / "checkpoint-2", tmp_path / "checkpoint-2")
    train(str(run_file), str(tmp_path), ["train.resume_from_checkpoint=auto"])
    assert_close(arrays_of(tmp_path / "checkpoint-4"), arrays_of(one_device / "checkpoint-4"))
