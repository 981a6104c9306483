"""Training on a mix of weighted sources on several ranks.

Guarantees, under data parallelism with every layer sharded: loss, the loss of each source, gradient
norm and every parameter equal the run on one device with the same rows, with loss weights of the
sources; a run continues what one device saved, document by document.
"""

from pathlib import Path
from typing import ClassVar

import pytest

from tests.single_card_tests.train.corpus_run import write_corpus_run
from tests.support.finished_runs import arrays_of, assert_close, lasting_metrics
from tests.support.launch import launch
from tests.support.tolerance import TOPOLOGY
from tests.support.topology_runs import (
    SHARDING,
    STAGE_3,
    EqualsOneDevice,
    continue_run,
    num_data_parts,
    train,
)


@pytest.fixture(scope="module", autouse=True)
def _few_lanes():
    """So that the strands of a checkpoint continue after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paddle_vl.data.corpus.loader.PHASES", 2)
        yield


def worker(run_file: str, one_device: str, output_dir: str, overrides: list[str]) -> None:
    """A run, and one that continues what one device saved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paddle_vl.data.corpus.loader.PHASES", 2)
        train(run_file, output_dir, overrides)
        continue_run(run_file, one_device, f"{output_dir}-resumed", overrides)


class TestMix(EqualsOneDevice):
    topologies: ClassVar = {"sharding2 stage 3": (2, [*SHARDING, STAGE_3])}

    @pytest.fixture(scope="class")
    @classmethod
    def run_file(cls, tmp_path_factory) -> Path:
        run_file = write_corpus_run(tmp_path_factory.mktemp("corpus"))
        text = run_file.read_text(encoding="utf-8")
        # Both loss weights and their default.
        weighted = text.replace("format: image_text", "format: image_text\n    loss_weight: 0.25")
        assert weighted.count("loss_weight") == 1
        run_file.write_text(weighted, encoding="utf-8")
        return run_file

    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        batch = f"train.per_device_train_batch_size={2 // num_data_parts}"
        return [
            *("train.save_steps=2", "data.packing_length=96", "train.learning_rate=0.001"), batch
        ]  # fmt: skip

    @pytest.fixture(scope="class")
    @classmethod
    def several(cls, request, run_file, one_device, tmp_path_factory) -> Path:
        num_ranks, topology = cls.topologies[request.param]
        output_dir = tmp_path_factory.mktemp("several") / "out"
        settings = [*cls.settings(run_file, num_data_parts(topology)), *topology]
        arguments = (str(run_file), str(one_device), str(output_dir), settings)
        launch(worker, num_ranks, arguments=arguments, timeout=300)
        return output_dir

    def test_every_step_and_every_parameter_equal_one_device(self, several, one_device):
        wanted = lasting_metrics(one_device)
        for found, lines in ((several, wanted), (Path(f"{several}-resumed"), wanted[2:])):
            for one, other in zip(lines, lasting_metrics(found), strict=True):
                of_sources = sorted(key for key in one if key.startswith("loss/"))
                assert sorted(key for key in other if key.startswith("loss/")) == of_sources
                assert len(of_sources) >= 2
                for key in ("step", "loss", "grad_norm", "target_tokens", *of_sources):
                    assert other[key] == pytest.approx(one[key], rel=TOPOLOGY), (one["step"], key)
            assert_close(arrays_of(found / "checkpoint-4"), arrays_of(one_device / "checkpoint-4"))

    # Ranks continue one device's checkpoint instead of their own, in the test above.
    test_a_resumed_run_is_bit_identical = None
