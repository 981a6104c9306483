"""Files of a path.

Guarantees: folders of saved data sets, of splits and of repositories give the files of a split in
their order; what is missing is named with what there is; orders of rows are never ignored.
"""

import json

import pytest

from paddle_vl.data.rows.containers import files_of


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def saved(**state):
    return {"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}], **state}


def names(folder, *wanted):
    return [file.relative_to(folder).as_posix() for file in files_of(folder, *wanted)]


def test_a_saved_data_set_has_the_order_of_its_state(tmp_path):
    write(tmp_path, {"state.json": saved(_split="test")})
    assert names(tmp_path) == names(tmp_path, "test") == ["b.arrow", "a.arrow"]
    with pytest.raises(RuntimeError, match="has the split 'test' and no other"):
        files_of(tmp_path, "train")


def test_an_order_of_rows_is_refused(tmp_path):
    write(tmp_path, {"state.json": saved(_indices_data_files=[{"filename": "i.arrow"}])})
    with pytest.raises(RuntimeError, match=r"call flatten_indices\(\)"):
        files_of(tmp_path)


def test_splits_of_a_saved_data_set_are_folders(tmp_path, caplog):
    states = {"train/state.json": saved(), "dev/state.json": saved(_split="dev")}
    write(tmp_path, {"dataset_dict.json": {"splits": ["train", "dev"]}, **states})
    assert names(tmp_path, "dev") == ["dev/b.arrow", "dev/a.arrow"]
    assert not caplog.text
    assert names(tmp_path)[0] == "train/b.arrow"
    assert "has the splits train, dev: train is read" in caplog.text
    with pytest.raises(RuntimeError, match="no split 'test': choose one of train, dev"):
        files_of(tmp_path, "test")


def test_names_of_files_and_folders_say_the_split(tmp_path):
    known = ["data/train-00000-of-2.parquet", "data/train-00001-of-2.parquet", "more.csv"]
    others = ["dataset_info.json", ".cache/x.json", "trainer.md"]
    write(tmp_path, dict.fromkeys([*known, *others, "validation.jsonl", "testing/a.json.gz"], ""))
    assert names(tmp_path, "train") == known
    assert names(tmp_path, "val") == ["validation.jsonl"]
    assert names(tmp_path, "test") == ["testing/a.json.gz"]


CARD = """---
configs:
- config_name: default
  data_files: [a.jsonl, more/*.jsonl]
- config_name: small
  data_files:
  - {split: train, path: more/1.jsonl}
  - {split: test, path: [a.jsonl]}
- config_name: folder
  data_dir: more
---
Text.
"""


def test_the_card_of_a_repository_names_files(tmp_path):
    write(tmp_path, {"README.md": CARD, "a.jsonl": "", "more/2.jsonl": "", "more/1.jsonl": ""})
    assert names(tmp_path) == ["a.jsonl", "more/1.jsonl", "more/2.jsonl"]
    assert names(tmp_path, "test", "small") == ["a.jsonl"]
    assert names(tmp_path, None, "folder") == ["more/1.jsonl", "more/2.jsonl"]
    with pytest.raises(RuntimeError, match="no subset 'large': choose one of default, small"):
        files_of(tmp_path, None, "large")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(RuntimeError, match="which are not all there"):
        files_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "split", "reason"),
    [
        ("a.txt", None, "has documents"),
        ("a.bin", None, "has tokens of pretraining"),
        ("a.jsonl", "test", "is one file"),
        ("none.jsonl", None, "no data file or folder"),
        ("", None, "has no data file"),
    ],
)
def test_other_paths_are_refused(tmp_path, name, split, reason):
    write(tmp_path, {"a.txt": "", "a.bin": ""} | ({"a.jsonl": ""} if split else {}))
    with pytest.raises(RuntimeError, match=reason):
        files_of(tmp_path / name, split)


def test_a_folder_of_data_sets_with_splits_of_their_own_is_refused(tmp_path):
    """Of Megatron Energon: the files to validate with have any names."""
    write(tmp_path, {"a/.nv-meta/split.yaml": "", "a/0.tar": "", "a/1.tar": ""})
    with pytest.raises(RuntimeError, match="/a in .* is a data set of Megatron Energon"):
        files_of(tmp_path)


@pytest.mark.parametrize("name", ["../a.arrow", "/etc/passwd", 3, "a\0b", "a\ud800"])
def test_a_saved_data_set_has_no_files_of_other_folders(tmp_path, name):
    write(tmp_path, {"s/state.json": {"_data_files": [{"filename": name}]}})
    with pytest.raises(RuntimeError, match=r"state.json names .* which is no file of"):
        files_of(tmp_path / "s")


@pytest.mark.parametrize("entry", ["data_files: ../*.jsonl", "data_dir: ../other"])
def test_a_card_names_no_files_of_other_folders(tmp_path, entry):
    write(tmp_path, {"a.jsonl": "", "other/a.jsonl": ""})
    card = f"---\nconfigs: [{{config_name: default, {entry}}}]\n---\n"
    write(tmp_path, {"s/README.md": card})
    with pytest.raises(RuntimeError, match=r"README.md names .* which is no file of"):
        files_of(tmp_path / "s")
