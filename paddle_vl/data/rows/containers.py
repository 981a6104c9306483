"""Which files a path stands for: a file, or a folder of a data set.

A folder may be one that Hugging Face's `datasets` saved, with or without splits, one of Megatron
Energon, a downloaded repository, whose README.md may name files for subsets and splits, or files
whose names or folders say the split (`train-00000.parquet`, `validation.jsonl`, `test/a.json`).
"""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from paddle_vl.data.corpus.energon import META, files_of_split, visible
from paddle_vl.files.inner_path import inner_path
from paddle_vl.files.text_file import read_json_object, read_text

logger = logging.getLogger(__name__)
_FRONT = re.compile(r"---\n(.*?)\n---\n", re.S)
_SAVED, _SPLITS, _CARD = "state.json", "dataset_dict.json", "README.md"
_DATA = re.compile(r".*\.((jsonl|json|ndjson|csv|tsv)(\.gz|\.zst)?|parquet|arrow|tar)")
_NO_DATA = ("dataset_info.json", "dataset_infos.json", _SAVED, _SPLITS)
_SPLIT_WORDS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation",
    "val": "validation", "dev": "validation", "test": "test", "testing": "test", "eval": "test",
}  # fmt: skip
_REFUSED = {
    ".txt": "has documents, no conversations: write each as a row with its text for pretraining",
    ".bin": "has tokens of pretraining, no conversations: name it as a source of format: text",
    ".idx": "has tokens of pretraining, no conversations: name it as a source of format: text",
}


def files_of(path: Path, split: str | None = None, subset: str | None = None) -> list[Path]:
    """The data files of a path, in order.

    Args:
        split: of a data set; None for `train`.
        subset: of a repository; None for its default one.

    Raises:
        RuntimeError: there is no such path, split or subset, or it is of a kind that is not read.
    """
    if path.is_file():
        if reason := _REFUSED.get(path.suffix.lower()):
            raise RuntimeError(f"data file {path} {reason}")
        if subset is not None or split not in (None, "train"):
            raise RuntimeError(
                f"data file {path} is one file, without subset {subset!r} or split {split!r}: name "
                "the folder of the data set, or the file that has them"
            )
        return [path]
    if not path.is_dir():
        raise RuntimeError(f"there is no data file or folder {path}: check the path")
    try:
        if (path / _SPLITS).is_file():
            names = read_json_object(path / _SPLITS, "a list of splits")["splits"]
            return files_of(path / _chosen(path, split, names))
        if (path / _SAVED).is_file():
            return _saved(path, split)
        if (path / META).is_dir():
            return files_of_split(path, split or "train")
        return _repository(path, split, subset)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise RuntimeError(
            f"what folder {path} says about its files cannot be read ({error!r}): name the files"
        ) from error


def _chosen(folder: Path, split: str | None, names: list[str]) -> str:
    """The split, or `train` with a word about the others."""
    if split is None and set(names) != {"train"}:
        logger.warning("%s has the splits %s: train is read", folder, ", ".join(names))
    if (split := split or "train") not in names:
        raise RuntimeError(f"{folder} has no split {split!r}: choose one of {', '.join(names)}")
    return split


def _saved(folder: Path, split: str | None) -> list[Path]:
    state = read_json_object(folder / _SAVED, "the state of a saved data set")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise RuntimeError(
            f"{folder} is saved with an order of its rows (_indices_data_files): call "
            "flatten_indices() before save_to_disk()"
        )
    own = state.get("_split")
    if split not in (None, own) and (own is not None or split != "train"):
        raise RuntimeError(f"{folder} has the split {own!r} and no other, not {split!r}")
    names = [each["filename"] for each in state["_data_files"]]
    return [inner_path(folder, each, folder / _SAVED) for each in names]


def _repository(folder: Path, split: str | None, subset: str | None) -> list[Path]:
    if configs := _configs(folder / _CARD):
        return _listed(folder, configs, split, subset)
    if subset is not None:
        if not (folder / subset).is_dir():
            raise RuntimeError(f"{folder} has no subset {subset!r}: there is no such folder")
        return files_of(folder / subset, split)
    if inside := sorted(folder.rglob(META)):
        raise RuntimeError(
            f"{inside[0].parent} in {folder} is a data set of Megatron Energon with splits of its "
            "own: name that folder"
        )
    splits: dict[str, list[Path]] = {}
    for file in visible(folder.rglob("*"), folder):
        inner = file.relative_to(folder).as_posix().lower()
        if _DATA.fullmatch(inner) and file.name not in _NO_DATA:
            words = [_SPLIT_WORDS.get(word) for word in re.split(r"[-_./]", inner)]
            found = [word for word in words if word]
            splits.setdefault(found[-1] if found else "train", []).append(file)
    if not splits:
        raise RuntimeError(f"folder {folder} has no data file: name a file, or another folder")
    return splits[_chosen(folder, _SPLIT_WORDS.get(split or "", split), [*splits])]


def _listed(
    folder: Path, configs: Sequence[Mapping[str, Any]], split: str | None, subset: str | None
) -> list[Path]:
    """The files that the card of a repository names."""
    named = {each["config_name"]: each for each in configs}
    usual = [name for name, each in named.items() if each.get("default") or name == "default"]
    chosen = subset or next(iter(usual or (named if len(named) == 1 else ())), None)
    if chosen not in named:
        names = ", ".join(named)
        raise RuntimeError(f"{folder} has no subset {chosen or ''!r}: choose one of {names}")
    files = named[chosen].get("data_files")
    if files is None:
        return files_of(inner_path(folder, named[chosen]["data_dir"], folder / _CARD), split)
    if not isinstance(files, list) or not isinstance(files[0], Mapping):
        files = [{"split": "train", "path": files}]
    patterns = {each["split"]: each["path"] for each in files}
    own = patterns[_chosen(folder, split, [*patterns])]
    own = [own] if isinstance(own, str) else own
    for each in own:
        inner_path(folder, each, folder / _CARD)
    found = [visible(folder.glob(each), folder) for each in own]
    if not all(found):
        raise RuntimeError(f"{folder / _CARD} names {own}, which are not all there: fetch them")
    return [file for each in found for file in each]


def _configs(card: Path) -> Sequence[Mapping[str, Any]]:
    """The subsets that the front matter of a card lists."""
    match = card.is_file() and _FRONT.match(read_text(card, "the card of a data set"))
    try:
        found = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RuntimeError(f"{card} does not begin with YAML ({error}): correct it") from error
    return (found.get("configs") if isinstance(found, dict) else None) or ()
