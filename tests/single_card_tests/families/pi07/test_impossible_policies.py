"""Invalid statistics, metadata and tokenizers.

Guarantees: a negative spread, NaN and a wrong size are refused with file, feature and value, in
files and checkpoints; metadata outside the training range is refused in data and at inference; a
tokenizer with ids beyond the model's vocabulary is refused.
"""

import json

import numpy as np
import pytest

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import MediaFolder
from paddle_vl.families.policy.demonstrations.dataset import parse_moment
from paddle_vl.families.policy.demonstrations.sample import DemonstrationShapes
from paddle_vl.families.policy.features import PolicyFeature
from paddle_vl.families.policy.model_inputs import metadata_texts
from paddle_vl.families.policy.normalize import Normalizer, read_statistics
from paddle_vl.families.policy.tokenizers import ActionTokenizer

GOOD = {
    "mean": [0.0, 1.0], "std": [1.0, 0.0], "min": [-1.0, 1.0], "max": [1.0, 1.0],
    "q01": [-0.9, 1.0], "q99": [0.9, 1.0], "count": [5],
}  # fmt: skip
SPREADS = [
    ("std", [1.0, -0.5], r"std\[1\] is -0.5; it must be at least 0"),
    ("max", [-2.0, 1.0], r"min\[0\] is -1.0 and max\[0\] -2.0"),
    ("q99", [-2.0, 1.0], r"q01\[0\] is -0.9 and q99\[0\] -2.0"),
    ("mean", [float("nan"), 0.0], r"mean\[0\] is nan; it must be a finite number"),
    ("max", [1.0, float("inf")], r"max\[1\] is inf"),
]


@pytest.mark.parametrize(
    ("stat", "values", "named"),
    [
        *SPREADS,
        ("count", [0], r"count\[0\] is 0; it must be at least 1"),
        ("mean", [0.0], "mean has 1 numbers, the policy's feature 2"),
        ("std", 3.0, r"std has shape \[\]"),
        ("std", [[1.0, 1.0]], r"std has shape \[1, 2\]"),
    ],
)
def test_statistics_of_a_file_are_refused_by_feature_and_value(tmp_path, stat, values, named):
    file = tmp_path / "statistics.json"
    file.write_text(json.dumps({"arm": {"state": GOOD}}))
    assert read_statistics(file, ["arm"], {"state": 2})["arm"]["state"]["std"].shape == (2,)
    file.write_text(json.dumps({"arm": {"state": GOOD | {stat: values}}}))
    match = rf"statistics\.json: group 'arm', feature 'state': {named}"
    with pytest.raises(ValueError, match=match):
        read_statistics(file, ["arm"], {"state": 2})


@pytest.mark.parametrize("text", ["[1]", "42", '{"a": 3}', '{"a": {"b": {"std": "x"}}}', "\0"])
def test_files_without_statistics_are_named(tmp_path, text):
    file = tmp_path / "statistics.json"
    file.write_text(text)
    with pytest.raises(RuntimeError, match=r"statistics\.json"):
        read_statistics(file)


@pytest.mark.parametrize(("stat", "values", "named"), SPREADS)
@pytest.mark.parametrize("mode", ["MEAN_STD", "MIN_MAX", "QUANTILE"])
def test_statistics_that_are_given_are_refused(mode, stat, values, named):
    normalizer = Normalizer({"state": PolicyFeature("STATE", (2,))}, {"STATE": mode}, 1)
    normalizer.set_statistics([{"state": GOOD}])
    needed = {"MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "QUANTILE": ("q01", "q99")}
    bad = [{"state": GOOD | {stat: values}}]
    if stat not in needed[mode]:
        normalizer.set_statistics(bad)
        return
    with pytest.raises(ValueError, match="of 'state' in group 0"):
        normalizer.set_statistics(bad)


def test_statistics_of_a_checkpoint_may_be_absent_but_not_contradict_themselves():
    normalizer = Normalizer({"state": PolicyFeature("STATE", (2,))}, {"STATE": "MEAN_STD"}, 1, 2)
    normalizer.check("a checkpoint")
    normalizer.tensors["buffer_state.mean"][1] = 0
    normalizer.tensors["buffer_state.std"][1] = [1, -1]
    with pytest.raises(ValueError, match=r"a checkpoint: of 'state' in group 1 std\[1\] is -1"):
        normalizer.check("a checkpoint")


METADATA = [
    ("speed", -1, "from 0 to 100"), ("speed", 101, "from 0 to 100"), ("speed", 10**30, "100 bits"),
    ("quality", 0, "from 1 to 5"), ("quality", 6, "from 1 to 5"),
    ("fps", 0, "from 1 to 1000"), ("fps", -30, "from 1 to 1000"), ("fps", 10**9, "to 1000"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "named"), METADATA)
def test_metadata_of_a_line_beyond_its_range_is_refused(tmp_path, name, value, named):
    shapes = DemonstrationShapes(("camera0",), (8, 8), 2)
    line = {"state": [[0.0, 1.0]], "camera0": "a.png", "prompt": "go", name: 3}
    assert parse_moment(json.dumps(line).encode(), MediaFolder(tmp_path), shapes).words[name] == 3
    with pytest.raises(BadSampleError, match=rf"'{name}' is .*{named}"):
        parse_moment(json.dumps(line | {name: value}).encode(), MediaFolder(tmp_path), shapes)


@pytest.mark.parametrize(("name", "value", "named"), METADATA)
def test_metadata_at_inference_beyond_its_range_is_refused(name, value, named):
    value = min(value, 2**62)
    batch = {name: np.array([3]), f"{name}_is_pad": np.array([False])}
    assert metadata_texts(batch, 1)[0].endswith(": 3, ")
    batch[name] = np.array([value])
    with pytest.raises(ValueError, match=f"'{name}' is .*must be from"):
        metadata_texts(batch, 1)
    batch[f"{name}_is_pad"] = np.array([True])
    assert metadata_texts(batch, 1) == [""]


def test_truth_or_nan_is_no_speed():
    for value, named in ((True, "True"), (float("nan"), "nan")):
        batch = {"speed": np.array([value]), "speed_is_pad": np.array([False])}
        with pytest.raises(ValueError, match=f"'speed' is {named}"):
            metadata_texts(batch, 1)


@pytest.fixture
def action_tokenizer(tmp_path):
    chunks = [np.random.default_rng(i).normal(size=(4, 2)).clip(-1, 1) for i in range(8)]
    ActionTokenizer.fit(chunks, vocab_size=128).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [("scale", 0, "scale is 0"), ("scale", 2**53, "scale is 9007199254740992"),
     ("scale", -1, "scale is -1"), ("scale", "x", "scale is 'x'"),
     ("vocab_size", 1.5, "vocab_size is 1.5"), ("vocab_size", 10**12, "vocab_size is 10000"),
     ("vocab_size", 1, "has the id"), ("min_token", None, "min_token is None"),
     ("time_horizon", 0, "time_horizon is 0"), ("action_dim", True, "action_dim is True")],
)  # fmt: skip
def test_settings_of_action_tokenizers_are_refused_by_name(action_tokenizer, name, value, named):
    file = action_tokenizer / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=rf"processor_config\.json: .*{named}"):
        ActionTokenizer.from_pretrained(action_tokenizer)


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"model": 3}', '{"model": {"type": "BPE"}}'])
def test_damaged_tokenizers_are_named(action_tokenizer, text):
    (action_tokenizer / "tokenizer.json").write_text(text)
    with pytest.raises(RuntimeError, match=r"tokenizer\.json .*fetch or save it again"):
        ActionTokenizer.from_pretrained(action_tokenizer)
