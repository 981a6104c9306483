"""Sources written as text, as in other trainers' commands and settings.

    a.jsonl,b.json                         two files
    a.jsonl#500                            500 rows of a file
    talks, talks#500, talks%50             a data set of a dataset_info file; half of it
    hf::org/name:subset1/subset2#500       a data set on a hub; also ms::, hf://, ms://
    org/name                               on the hub that is the default

An existing path is taken as it is, whatever it contains.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from paddle_vl.config.row_sources import STOPPING, RowSourceConfig, Strategy
from paddle_vl.data.rows.dataset_info import DatasetInfo, source_config

_HUB = re.compile(r"(?P<hub>hf|ms|aistudio)(::|://)(?P<name>.*)", re.I)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_NUMBER = re.compile(r"[0-9]+")


def row_sources(
    written: str | RowSourceConfig | Sequence[str | RowSourceConfig],
    info: DatasetInfo | None = None,
) -> list[RowSourceConfig]:
    """The sources that texts name.

    Args:
        info: data sets by name.

    Raises:
        ValueError: a text names no file, data set or number of rows; says what to write.
    """
    if isinstance(written, RowSourceConfig):
        return [written]
    if not isinstance(written, str):
        return [source for each in written for source in row_sources(each, info)]
    if Path(written).exists():
        return [source_config(written, path=written)]
    return [_source(each.strip(), info) for each in written.split(",")]


def _source(text: str, info: DatasetInfo | None) -> RowSourceConfig:
    if Path(text).exists():
        return source_config(text, path=text)
    name, count = text, {}
    if "#" in text:
        name, _, number = text.rpartition("#")
        count = {"num_samples": _count(text, number)}
    elif "%" in text:
        name, _, number = text.rpartition("%")
        if (percent := _count(text, number)) > 100:
            raise ValueError(
                f"{text!r}: {percent} percent would be all rows, once, in the tool that has this "
                f"spelling: write {name}, or {name}#NUMBER to repeat rows"
            )
        count = {"ratio": percent / 100}
    if Path(name).exists():
        return source_config(text, path=name, **count)
    if info is not None and name in info.entries:
        source = info.source(name)
        if count:
            own = source.model_dump(exclude={"num_samples", "ratio"}, exclude_unset=True)
            source = source_config(text, **own, **count)
        return source
    return source_config(text, **_hub(text, name), **count)


def _count(text: str, number: str) -> int:
    if not _NUMBER.fullmatch(number) or not int(number):
        raise ValueError(
            f"{text!r} ends in {number!r}, which is no number of rows: write a whole number above 0"
        )
    return int(number)


def _hub(text: str, name: str) -> dict[str, object]:
    """Address and subsets of a data set on a hub."""
    match = _HUB.fullmatch(name)
    prefix = f"{match['hub'].lower()}://" if match else ""
    repository, _, subsets = (match["name"] if match else name).partition(":")
    if not _REPOSITORY.fullmatch(repository) or (not match and _is_path(name)):
        raise ValueError(
            f"{text!r} names no data: there is no such file, and no such data set in a "
            "dataset_info file; on a hub it would be hf::org/name or ms::org/name"
        )
    return {"path": prefix + repository, "subsets": subsets.split("/") if subsets else []}


def _is_path(name: str) -> bool:
    """Whether a text is rather a mistyped path than a name on a hub."""
    first, _, last = name.partition("/")
    return first in (".", "..") or Path(first).is_dir() or bool(re.search(r"\.\w{2,7}$", last))


def strategy_of(text: str) -> Strategy:
    """A mixture's strategy by its name in any trainer.

    Raises:
        ValueError: there is none of that name.
    """
    known: dict[str, Strategy] = {"concat": "concat", **STOPPING}
    known |= {strategy: strategy for strategy in STOPPING.values()}
    if text not in known:
        raise ValueError(f"there is no mix strategy {text!r}: use one of {', '.join(known)}")
    return known[text]


def weighted(sources: Sequence[RowSourceConfig], written: str) -> list[RowSourceConfig]:
    """The sources with weights from a text, such as `0.7,0.3`.

    Raises:
        ValueError: there is not one number for each.
    """
    numbers = written.split(",")
    if len(numbers) != len(sources):
        raise ValueError(
            f"{len(sources)} sources have {len(numbers)} probabilities ({written!r}): give each one"
        )
    try:
        weights = [float(each) for each in numbers]
    except ValueError as error:
        raise ValueError(f"{written!r} are no probabilities: {error}") from error
    return [
        source_config(each.label, **{**each.model_dump(), "weight": weight})
        for each, weight in zip(sources, weights, strict=True)
    ]
