"""Tokenizers of texts and action chunks; invalid statistics, metadata and tokenizers.

Guarantees: texts begin with the file's or the configured token, and are cut and padded on the
right; the action tokenizer computes as FAST's published code and survives saving and loading; both
refuse invalid files; a negative spread, NaN and a wrong size are refused with file, feature and
value; metadata outside the training range is refused in data and at inference.
"""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy.fft import dct
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import MediaFolder
from paddle_vl.families.policy.demonstrations.dataset import parse_moment
from paddle_vl.families.policy.demonstrations.sample import DemonstrationShapes
from paddle_vl.families.policy.features import PolicyFeature
from paddle_vl.families.policy.model_inputs import metadata_texts
from paddle_vl.families.policy.normalize import Normalizer, read_statistics
from paddle_vl.families.policy.tokenizers import ActionTokenizer, PromptTokenizer, padded_tokens


def word_tokenizer(begins_texts: bool) -> Tokenizer:
    words = {"<pad>": 0, "<bos>": 2, "Task": 3, ":": 4, "go": 5, ",": 6, "<unk>": 7}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if begins_texts:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 2)]
        )
    tokenizer.enable_padding(length=12)
    tokenizer.enable_truncation(1)
    return tokenizer


@pytest.mark.parametrize("begins_texts", [True, False])
def test_texts_begin_with_bos_and_fill_up_on_the_right(tmp_path, begins_texts):
    word_tokenizer(begins_texts).save(str(tmp_path / "tokenizer.json"))
    settings = {"add_bos_token": True, "bos_token": {"content": "<bos>"}, "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = PromptTokenizer.from_pretrained(tmp_path)
    ids, mask = tokenizer.padded(["Task: go, ", "", "go go go go go go"], 5, True)
    assert ids.tolist() == [[2, 3, 4, 5, 6], [2, 0, 0, 0, 0], [2, 5, 5, 5, 5]]
    assert mask.tolist() == [[True] * 5, [True] + [False] * 4, [True] * 5]
    ids, mask = tokenizer.padded(["go", ""], 2, False)
    assert ids.tolist() == [[5, 0], [0, 0]]
    assert mask.tolist() == [[True, False], [False, False]]
    assert tokenizer.encode("Task: ") == [3, 4]
    again = tmp_path / "again"
    again.mkdir()
    tokenizer.save_pretrained(again)
    assert PromptTokenizer.from_pretrained(again).encode("go", True) == [2, 5]


def test_prompt_tokenizer_refuses_what_is_none(tmp_path):
    with pytest.raises(RuntimeError, match="no tokenizer file.*gemma-3-4b-pt"):
        PromptTokenizer.from_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    for text in ("{", "[1]", "{}"):
        file.write_text(text)
        with pytest.raises(
            RuntimeError, match=r"tokenizer\.json is not (a tokenizer file|valid JSON)"
        ):
            PromptTokenizer.from_pretrained(tmp_path)


def chunks(count: int = 40) -> np.ndarray:
    random = np.random.default_rng(3)
    steps = np.linspace(0, 3, 8)[None, :, None]
    waves = np.sin(
        steps * random.uniform(0.5, 2, (count, 1, 3)) + random.uniform(0, 6, (count, 1, 3))
    )
    return waves.astype(np.float32)


def published_fit(
    data: np.ndarray, scale: float, vocab_size: int
) -> tuple[ByteLevelBPETokenizer, int]:
    """FAST's `fit`, written from its description."""
    rounded = [np.around(dct(a, axis=0, norm="ortho").flatten() * scale) for a in data]
    least, most = int(np.concatenate(rounded).min()), int(np.concatenate(rounded).max())
    bpe = ByteLevelBPETokenizer()
    trainer = BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, show_progress=False, special_tokens=[],
        initial_alphabet=[chr(i) for i in range(most - least + 1)], max_token_length=10000,
    )  # fmt: skip
    texts = ("".join(map(chr, (r - least).astype(int))) for r in rounded)
    bpe._tokenizer.train_from_iterator(texts, trainer=trainer)
    return bpe, least


def test_fit_and_encode_are_those_of_fast():
    data = chunks()
    tokenizer = ActionTokenizer.fit(data, scale=10, vocab_size=300)
    bpe, least = published_fit(data, 10, 300)
    assert tokenizer.min_token == least
    coefficients = np.around(dct(data, axis=1, norm="ortho") * 10)
    texts = ["".join(map(chr, (c.flatten() - least).astype(int))) for c in coefficients]
    assert tokenizer(data) == [bpe.encode(text).ids for text in texts]
    # Merges give fewer tokens than coefficients.
    assert max(len(ids) for ids in tokenizer(data)) < data[0].size


def test_a_saved_action_tokenizer_is_the_same(tmp_path):
    data = chunks()
    tokenizer = ActionTokenizer.fit(data, scale=20, vocab_size=400, time_horizon=8, action_dim=3)
    tokenizer.save_pretrained(tmp_path / "fast")
    again = ActionTokenizer.from_pretrained(tmp_path / "fast")
    assert again(data) == tokenizer(data)
    assert (again.scale, again.vocab_size, again.min_token) == (20, 400, tokenizer.min_token)
    assert (again.time_horizon, again.action_dim) == (8, 3)


def test_coefficients_below_the_least_become_it():
    tokenizer = ActionTokenizer.fit(chunks(), vocab_size=300)
    assert tokenizer(chunks()[0] * 100 - 100)[0]


def test_action_tokenizer_refuses_what_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="no action chunks"):
        ActionTokenizer.fit([])
    with pytest.raises(ValueError, match="vocab_size 5 cannot hold"):
        ActionTokenizer.fit(chunks(), vocab_size=5)
    with pytest.raises(RuntimeError, match=r"there is no .*processor_config\.json"):
        ActionTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\[8\]"):
        ActionTokenizer.fit(chunks(), vocab_size=300)(np.zeros(8))


@pytest.mark.parametrize("value", [1e9, 55_296 / np.sqrt(8) / 10, np.nan, np.inf])
def test_actions_whose_coefficients_have_no_character_are_refused(value):
    tokenizer = replace(ActionTokenizer.fit(chunks(), vocab_size=300), min_token=0)
    with pytest.raises(ValueError, match="has no character: normalize the actions, or lower the "):
        tokenizer(np.full((8, 3), value))


def test_without_scipy_its_extra_is_named(monkeypatch):
    tokenizer = ActionTokenizer.fit(chunks(), vocab_size=300)
    monkeypatch.setitem(sys.modules, "scipy", None)
    for use in (tokenizer, ActionTokenizer.fit):
        with pytest.raises(RuntimeError, match="install 'scipy.*extra `pi07`"):
            use(chunks())


def test_files_of_newer_libraries_are_found(tmp_path):
    tokenizer = ActionTokenizer.fit(chunks(), vocab_size=300)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "bpe_tokenizer").mkdir()
    (tmp_path / "tokenizer.json").rename(tmp_path / "bpe_tokenizer" / "tokenizer.json")
    assert ActionTokenizer.from_pretrained(tmp_path)(chunks()) == tokenizer(chunks())


def test_tokens_are_cut_with_a_warning_and_filled_with_zeros(caplog):
    ids, mask = padded_tokens([[5, 6, 7], [8]], 2)
    assert ids.tolist() == [[5, 6], [8, 0]]
    assert mask.tolist() == [[True, True], [True, False]]
    assert "3 action tokens" in caplog.text


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
    ],
)
def test_statistics_of_a_file_are_refused_by_feature_and_value(tmp_path, stat, values, named):
    file = tmp_path / "statistics.json"
    file.write_text(json.dumps({"arm": {"state": GOOD}}))
    assert read_statistics(file, ["arm"])["arm"]["state"]["std"].shape == (2,)
    file.write_text(json.dumps({"arm": {"state": GOOD | {stat: values}}}))
    match = rf"statistics\.json: group 'arm', feature 'state': {named}"
    with pytest.raises(ValueError, match=match):
        read_statistics(file, ["arm"])


@pytest.mark.parametrize("text", ["[1]", "42", '{"a": 3}', '{"a": {"b": {"std": "x"}}}', "\0"])
def test_files_without_statistics_are_named(tmp_path, text):
    file = tmp_path / "statistics.json"
    file.write_text(text)
    with pytest.raises(RuntimeError, match=r"statistics\.json.*group -> feature -> statistic"):
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
    assert parse_moment(json.dumps(line).encode(), MediaFolder(tmp_path), shapes)[name] == 3
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
