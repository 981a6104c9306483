"""Data that a profile trains on.

Guarantees: conversations have the requested images and answer tokens, are read by the run's
processor, and do not depend on the rank that writes them; a policy has the requested number of
cameras, all like its first, and keeps its drop probabilities; requests that a family cannot meet
are refused by name.
"""

import json

import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.config.schema import RunConfig, TrainConfig
from paddle_vl.families.pi07.settings import PI07Run
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.synthetic import write_conversations
from paddle_vl.profile.workload import Workload, with_workload
from tests.single_card_tests.train.tiny_run import write_tiny_run

CAMERA = {"type": "VISUAL", "shape": [3, 28, 28]}
POLICY = {
    "type": "pi07_low_level",
    "input_features": {"front": CAMERA, "state": {"type": "STATE", "shape": [4]}},
}


@pytest.fixture
def run_file(tmp_path):
    return write_tiny_run(tmp_path / "run")


@pytest.fixture
def config(run_file):
    return load_run_config(run_file, ["parallel.dp_degree=2"])


def policy_config(run: RunConfig, **model: object) -> RunConfig:
    return PI07Run.model_validate(
        {
            "model": {"config": POLICY, **model},
            "data": {"train": run.data.train, "drops": {"subgoal_drop_prob": 0.125}},
            "parallel": {"dp_degree": run.parallel.dp_degree},
            "train": run.train.model_dump(include={*TrainConfig.model_fields}),
        }
    )


def test_conversations_have_the_shapes_asked_for(config, run_file, tmp_path):
    processor = VLProcessor.from_pretrained(run_file.with_name("processor"))
    shapes = {"num_images": 3, "image_side": 16, "answer_tokens": 20}
    file = write_conversations(tmp_path / "data", 5, processor.tokenizer, **shapes)
    samples = MessagesDataset([file], processor, max_length=512, on_bad_sample="fail")
    assert len(samples) == 5
    for number in range(5):
        sample = samples[number]
        assert sample["image_grid_thw"].tolist() == [[1, 4, 4]] * 3
        # The end token is a target too, followed by a newline.
        assert (sample["labels"] != -100).sum() in (20, 21, 22)
    with pytest.raises(ValueError, match="at least 1"):
        write_conversations(tmp_path, 1, processor.tokenizer, answer_tokens=0)
    first = file.read_bytes()
    assert write_conversations(tmp_path / "data", 5, processor.tokenizer, **shapes) == file
    assert file.read_bytes() == first


def test_made_up_data_replaces_the_runs_own(config, tmp_path):
    assert with_workload(config, Workload(), tmp_path) is config
    assert not list(tmp_path.glob("data"))
    changed = with_workload(config, Workload(is_synthetic=True), tmp_path)
    assert changed.data.train == [str(tmp_path / "data" / "conversations.jsonl")]
    # Eight batches on two ranks with two samples each.
    assert len((tmp_path / "data" / "conversations.jsonl").read_text().splitlines()) == 32
    assert changed.model_copy(update={"data": config.data}) == config


def test_a_policy_gets_cameras_like_its_first_and_keeps_its_drops(config, tmp_path):
    policy = policy_config(config)
    assert with_workload(policy, Workload(True), tmp_path).model.config == POLICY
    changed = with_workload(policy, Workload(True, cameras=2), tmp_path)
    features = changed.model.policy.input_features
    assert features == {
        "camera0": CAMERA, "camera1": CAMERA, "state": POLICY["input_features"]["state"],
    }  # fmt: skip
    assert (changed.data.train, changed.data.synthetic_samples) == ([], 32)
    assert changed.data.drops == policy.data.drops
    (tmp_path / "config.json").write_text(json.dumps(POLICY))
    trained = policy_config(config, config=None, pretrained=str(tmp_path))
    changed = with_workload(trained, Workload(True, cameras=2), tmp_path)
    assert list(changed.model.policy.input_features) == ["camera0", "camera1", "state"]


def test_on_its_own_data_a_policy_leaves_cameras_out_or_has_some_that_samples_lack(
    config, tmp_path
):
    own = {"front": CAMERA, "camera0": CAMERA, "state": POLICY["input_features"]["state"]}
    policy = policy_config(config, config=POLICY | {"input_features": own})
    one, three = (
        with_workload(policy, Workload(cameras=number), tmp_path).model.policy for number in (1, 3)
    )
    assert (list(one.input_features), one.empty_cameras) == (["front", "state"], None)
    assert list(three.input_features) == ["front", "camera0", "camera1", "state"]
    assert three.empty_cameras == 1
    with pytest.raises(ValueError, match="--cameras 2: the run's data .* --synthetic makes"):
        with_workload(config, Workload(cameras=2), tmp_path)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload(cameras=0), "--cameras 0"),
        (Workload(image_side=64), "--image-side shapes made-up samples: it needs --synthetic"),
        (Workload(True, image_side=64), "--image-side shapes made-up conversations"),
        (Workload(True, cameras=0), "--cameras 0"),
    ],
)
def test_what_a_policy_cannot_give_is_refused(config, tmp_path, workload, message):
    with pytest.raises(ValueError, match=message):
        with_workload(policy_config(config), workload, tmp_path)
