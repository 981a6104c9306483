"""Data sets by name, from the files of other trainers: LLaMA-Factory's dataset_info.json (an
object) and the YAML of its version 1, and ms-swift's list of data sets.

All that an entry says is honoured or refused. An entry is looked at when it is used: a file may
list others that cannot be.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from paddle_vl.config.row_sources import RowSourceConfig
from paddle_vl.config.section import Section
from paddle_vl.files.stored_settings import explained
from paddle_vl.files.text_file import read_text

# LLaMA-Factory's names of columns, and the keys of a row.
_KEYS = {key: key for key in ("messages", "system", "tools", "images", "videos", "history")}
_KEYS |= {"prompt": "instruction", "query": "input", "response": "output"}
_REFUSED = {
    "script_url": "it runs Python of the data set, which is never done: convert the data to JSONL",
    "om_hub_url": "this hub is not read: download the data set, and name its folder",
    "cloud_file_name": "cloud storage is not read: download the file, and use file_name",
}


class _LlamaFactory(Section):
    """An entry of dataset_info.json."""

    file_name: str | None = None
    hf_hub_url: str | None = None
    ms_hub_url: str | None = None
    formatting: Literal["alpaca", "sharegpt", "openai"] = "alpaca"
    ranking: bool = False
    subset: str | None = None
    split: str | None = None
    folder: str | None = None
    num_samples: int | None = None
    columns: dict[str, str | None] = Field(default={})
    tags: dict[str, str] = Field(default={})

    def values(self, hub: str) -> dict[str, Any]:
        if self.ranking or self.columns.keys() & {"chosen", "rejected", "kto_tag"}:
            raise ValueError(
                "it is for preference training (ranking), which is not done: use data with one "
                "answer to each question"
            )
        if unknown := sorted(self.columns.keys() - _KEYS.keys()):
            raise ValueError(f"columns has {unknown[0]!r}; {', '.join(_KEYS)} are read")
        path = _address(hub, self.hf_hub_url, self.ms_hub_url) or self.file_name
        is_list = self.formatting != "alpaca"
        return {
            "path": path,
            "format": "messages" if self.formatting == "openai" else self.formatting,
            "columns": {theirs: _KEYS[key] for key, theirs in self.columns.items() if theirs},
            "only_columns": bool(self.columns),
            "tags": self.tags if is_list else {},
            "subsets": [self.subset] if self.subset else [],
            "split": self.split,
            "folder": self.folder,
            "num_samples": self.num_samples,
        }


class _Version1(Section):
    """An entry of the YAML of LLaMA-Factory's version 1."""

    path: str
    source: Literal["hf_hub", "ms_hub", "local"] = "hf_hub"
    converter: Literal["alpaca", "sharegpt"] | None = None
    size: Annotated[int, Field(gt=0, le=10**9)] | None = None
    weight: Annotated[float, Field(gt=0, le=1e6)] | None = None
    split: str | None = None
    # Rows are read when they are needed in any case.
    streaming: bool = False

    def values(self, hub: str) -> dict[str, Any]:
        prefix = "" if self.source == "local" else f"{self.source[:2]}://"
        size, weight = self.size, self.weight
        return {
            "path": prefix + self.path,
            "format": self.converter,
            "split": self.split,
            "num_samples": size if size is None or weight is None else int(size * weight),
            # The number of rows is multiplied, which is no weight of an interleaved mixture.
            "ratio": weight if size is None else None,
        }


class _Swift(Section):
    """An entry of ms-swift's list; tags, help and huge_dataset are words for people."""

    dataset_name: str | None = None
    dataset_path: str | None = None
    ms_dataset_id: str | None = None
    hf_dataset_id: str | None = None
    subsets: list[str] = Field(default=[])
    split: list[str] = Field(default=[])
    columns: dict[str, str] = Field(default={})
    tags: list[str] = Field(default=[])
    help: str | None = None
    huge_dataset: bool = False

    @property
    def names(self) -> list[str]:
        known = (self.dataset_name, self.dataset_path, self.ms_dataset_id, self.hf_dataset_id)
        return [name for name in known if name]

    def values(self, hub: str) -> dict[str, Any]:
        path = self.dataset_path or _address(hub, self.hf_dataset_id, self.ms_dataset_id)
        values = {"path": path, "columns": self.columns, "subsets": self.subsets}
        return values | {"split": self.split or None}


def _address(hub: str, hugging_face: str | None, modelscope: str | None) -> str | None:
    """The address of a data set that may be on two hubs."""
    if modelscope and (hub == "ms" or not hugging_face):
        return f"ms://{modelscope}"
    return f"hf://{hugging_face}" if hugging_face else None


@dataclass(frozen=True)
class DatasetInfo:
    """Data sets of a file.

    Attributes:
        file: the file; relative paths start in its folder.
        entries: what it says about each, by name.
        hub: `hf` or `ms`, for data sets that are on both.
    """

    file: Path
    entries: Mapping[str, Any]
    hub: str = "hf"

    @classmethod
    def read(cls, file: str | Path, hub: str = "hf") -> "DatasetInfo":
        """
        Raises:
            RuntimeError: the file cannot be read.
            ValueError: it is no list or object of data sets.
        """
        file = Path(file)
        text = read_text(file, "a list of data sets")
        try:
            found = yaml.safe_load(text) if file.suffix in (".yaml", ".yml") else json.loads(text)
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            raise ValueError(f"{file} cannot be read ({error}): correct it") from error
        if isinstance(found, list):
            found = {
                name: entry
                for number, each in enumerate(found, start=1)
                for entry in [_checked(_Swift, each, f"{file}: data set {number}")]
                for name in entry.names
            }
        if not isinstance(found, dict):
            raise ValueError(f"{file} has no data sets: an object by name, or a list, is needed")
        return cls(file, found, hub)

    def source(self, name: str) -> RowSourceConfig:
        """The source of a name.

        Raises:
            ValueError: there is none, its file is missing, or the entry says what is not supported.
        """
        where = f"{self.file}: data set {name!r}"
        if name not in self.entries:
            raise ValueError(f"{where} is not defined: use one of {', '.join(self.entries)}")
        entry = self.entries[name]
        if not isinstance(entry, _Swift):
            keys = entry.keys() if isinstance(entry, Mapping) else set()
            for key in [key for key in _REFUSED if key in keys]:
                raise ValueError(f"{where} has {key}: {_REFUSED[key]}")
            kind = _Version1 if "path" in keys else _LlamaFactory
            entry = _checked(kind, entry, where)
        try:
            values = entry.values(self.hub)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if not values["path"]:
            raise ValueError(f"{where} names no file and no hub: add one")
        if "://" not in values["path"]:
            path = self.file.parent / Path(values["path"]).expanduser()
            if not path.exists():
                raise ValueError(f"{where} names {path}, which does not exist: correct the path")
            values["path"] = str(path)
        return source_config(where, name=name, **values)


def source_config(where: str, **values: Any) -> RowSourceConfig:
    """A source, with errors that name where it is written.

    Raises:
        ValueError: a value does not fit.
    """
    return _checked(RowSourceConfig, values, where)


def _checked(kind: Any, values: Any, where: str) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is a {type(values).__name__}; an object is needed")
    try:
        return kind(**values)
    except ValidationError as error:
        raise ValueError(f"{where}: {explained(error)}: correct or remove it") from None
