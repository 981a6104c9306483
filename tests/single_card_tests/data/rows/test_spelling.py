"""Sources as other trainers write them.

Guarantees: the golden spellings mean what they mean there, or are refused; existing paths win; all
that an entry of a dataset_info file says is honoured or refused.
"""

import json
from pathlib import Path

import pytest

from format_cases import check_mixtures
from paddle_vl.data.rows.dataset_info import DatasetInfo
from paddle_vl.data.rows.spelling import row_sources, strategy_of, weighted

GOLDEN = Path(__file__).parents[3] / "golden" / "formats" / "mixtures"


def facts(source):
    return source.model_dump(exclude_defaults=True)


def info(folder, entries, **options):
    (folder / "info.json").write_text(json.dumps(entries))
    (folder / "a.jsonl").write_text("{}")
    return DatasetInfo.read(folder / "info.json", **options)


def test_golden_spellings_mean_what_they_mean_elsewhere():
    cases = [*check_mixtures(GOLDEN)]
    assert len(cases) == len(json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8")))
    assert [case for case in cases if case[1]] == []


def test_existing_paths_win_over_all_syntax(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a,b.jsonl", "x#5", "y%7", "c"):
        Path(name).write_text("")
    written = ["a,b.jsonl", "x#5", "x#5#3", "c#2,y%7"]
    assert [facts(each) for each in row_sources(written)] == [
        {"path": "a,b.jsonl"}, {"path": "x#5"}, {"path": "x#5", "num_samples": 3},
        {"path": "c", "num_samples": 2}, {"path": "y%7"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("HF::org/data:v1/v2", {"path": "hf://org/data", "subsets": ["v1", "v2"]}),
        ("ms://org/data@v2#3", {"path": "ms://org/data@v2", "num_samples": 3}),
        ("org/data", {"path": "org/data"}),
    ],
)
def test_addresses_on_hubs(text, wanted):
    assert [facts(each) for each in row_sources(text)] == [wanted]


@pytest.mark.parametrize(
    "text",
    ["none.jsonl", "./org/data", "here/none", "org/data.json", "hf::name", "a#0", "a%101", "a#-1"],
)
def test_other_texts_are_refused(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    with pytest.raises(ValueError, match="names no data|write"):
        row_sources(text)


def test_golden_lists_of_version_1_and_of_swift():
    version_1 = DatasetInfo.read(GOLDEN / "lf_v1.yaml")
    short = {"path": str(GOLDEN / "alpaca.json"), "name": "short", "format": "alpaca"}
    assert facts(version_1.source("short")) == short | {"num_samples": 6}
    swift = DatasetInfo.read(GOLDEN / "swift_dataset_info.json")
    assert facts(swift.source("talks"))["path"] == str(GOLDEN / "rows.jsonl")
    columns = {"instruction": "query", "output": "response"}
    assert facts(swift.source("alpaca.json"))["columns"] == columns
    hub = {"path": "ms://org/data", "name": "org/data", "subsets": ["v1"], "split": ["train"]}
    assert facts(swift.source("org/data")) == hub


def test_a_number_beside_a_name_replaces_that_of_the_file(tmp_path):
    known = info(tmp_path, {"a": {"file_name": "a.jsonl", "num_samples": 4}})
    assert [each.num_samples for each in row_sources("a,a#9", known)] == [4, 9]
    with pytest.raises(ValueError, match="a#1000000000000: .*num_samples"):
        row_sources("a#1000000000000", known)
    (half,) = row_sources("a%50", known)
    assert (half.num_samples, half.ratio) == (None, 0.5)


def test_columns_of_llama_factory_replace_the_usual_ones(tmp_path):
    columns = {"prompt": "q", "query": None, "response": "r", "images": "pics"}
    entry = {"file_name": "a.jsonl", "columns": columns, "split": "test", "subset": "x"}
    found = info(tmp_path, {"a": entry}).source("a")
    assert found.columns == {"q": "instruction", "r": "output", "pics": "images"}
    assert (found.only_columns, found.split, found.subsets) == (True, "test", ["x"])


@pytest.mark.parametrize(("hub", "path"), [("hf", "hf://h/d"), ("ms", "ms://m/d")])
def test_data_on_two_hubs_is_read_from_the_chosen_one(tmp_path, hub, path):
    both = {"hf_hub_url": "h/d", "ms_hub_url": "m/d", "file_name": "none"}
    assert info(tmp_path, {"a": both}, hub=hub).source("a").path == path
    listed = [{"dataset_name": "a", "hf_dataset_id": "h/d", "ms_dataset_id": "m/d", "tags": ["x"]}]
    assert info(tmp_path, listed, hub=hub).source("a").path == path


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"script_url": "x.py"}, "runs Python of the data set"),
        ({"file_name": "a.jsonl", "ranking": True}, "preference"),
        ({"file_name": "a.jsonl", "columns": {"chosen": "c"}}, "preference"),
        ({"file_name": "a.jsonl", "columns": {"audios": "c"}}, "columns has 'audios'"),
        ({"file_name": "a.jsonl", "num_sample": 4}, "num_sample"),
        ({"file_name": "a.jsonl", "num_samples": "4"}, "num_samples"),
        ({"file_name": "a.jsonl", "num_samples": 0}, "num_samples"),
        ({"file_name": "a.jsonl", "num_samples": 1 << 62}, "num_samples"),
        ({"file_name": "b.jsonl"}, "does not exist"),
        ({}, "names no file and no hub"),
        ({"path": "a.jsonl", "source": "local", "converter": "pair"}, "converter"),
        ([], "an object is needed"),
        (None, "an object is needed"),
    ],
)
def test_entries_that_are_not_supported_are_refused_when_used(tmp_path, entry, reason):
    known = info(tmp_path, {"bad": entry, "good": {"file_name": "a.jsonl"}})
    assert known.source("good").path == str(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=reason) as error:
        known.source("bad")
    assert "info.json: data set 'bad'" in str(error.value)


def test_strategies_and_weights_fit_the_sources():
    assert strategy_of("all_exhausted") == strategy_of("interleave_over") == "interleave_over"
    with pytest.raises(ValueError, match="no mix strategy 'random'"):
        strategy_of("random")
    sources = row_sources("a/b,c/d")
    assert [each.weight for each in weighted(sources, "0.7, 0.3")] == [0.7, 0.3]
    for text in ("1", "1,2,3", "1,x", "1,-1", "1,nan"):
        with pytest.raises(ValueError, match="probabilities|weight"):
            weighted(sources, text)
