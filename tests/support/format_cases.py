"""Cases of whole files and of mixtures: what a folder's `expected.json` says about them.

containers/   files with the same rows, tables, and files that are refused
mixtures/     spellings of sources in several trainers, and what they draw
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from paddle_vl.config.row_sources import STOPPING, RowSourceConfig
from paddle_vl.data.corpus.cache import Cache
from paddle_vl.data.corpus.opener import ShardOpener
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.rows.dataset_info import DatasetInfo
from paddle_vl.data.rows.mixture import draws_of
from paddle_vl.data.rows.row_file import RowFile, open_rows, open_source
from paddle_vl.data.rows.spelling import row_sources, strategy_of, weighted

# The name of a case, and what is wrong with it.
Cases = Iterator[tuple[str, str | None]]
_SEED = 5
Sources = list[RowSourceConfig]
# Facts about sources, as `expected.json` names them.
_FACTS: dict[str, Callable[[Sources], Any]] = {
    "hub": lambda sources: {"hf": "hf", "ms": "modelscope"}[sources[0].path.partition(":")[0]],
    "repo": lambda sources: sources[0].path.partition("://")[2],
    "subsets": lambda sources: sources[0].subsets,
    "rate": lambda sources: sources[0].ratio,
    "format": lambda sources: sources[0].format,
    "datasets": lambda sources: [[each.name, each.ratio or 1.0] for each in sources],
}


def check_containers(folder: Path) -> Cases:
    """Compare the rows of files, which a folder has with `expected.json`."""
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    wanted = [_content(row, folder) for row in expected["rows"]]
    with _opener() as opener:
        opened = partial(open_rows, opener=opener)
        for name in expected["same_rows"]:
            yield name, _difference(partial(_contents, opened, folder / name), wanted)
        for file in sorted(folder.glob("*.[ct]sv")):
            yield file.name, _difference(partial(_pairs, opened, file), expected["csv_rows"])
        for name in expected["refused"]:
            yield name, _not_refused(partial(_contents, opened, folder / name))


def check_mixtures(folder: Path) -> Cases:
    """Compare what spellings of sources mean, and how many rows they draw."""
    info = DatasetInfo.read(folder / "dataset_info.json")
    # The spellings of some cases have these names, and no file that says what they are.
    names = DatasetInfo(
        info.file, {name: {"file_name": "rows.jsonl"} for name in ("name", "a", "b")}
    )
    with _opener() as opener:
        for case in json.loads((folder / "expected.json").read_text(encoding="utf-8")):
            written = case.get("write") or case.get("data_path") or case.get("dataset_info")
            if "file" in case or str(written).startswith("rows.jsonl"):
                written = f"{folder}/{written}"
            sources = partial(row_sources, written, info if "dataset_info" in case else names)
            name = f"{case['tool']}: {written or json.dumps(case['yaml'])}"
            if "yaml" in case:
                yield name, _wrong_mixture(case["yaml"], case["means"], info)
            elif "refused" in case or "refuse" in f"{case.get('rows')} {case.get('means')}":
                yield name, _not_refused(sources)
            else:
                wanted = {key: case[key] for key in _FACTS if key in case}
                if isinstance(case.get("rows"), int):
                    wanted["rows"] = case["rows"]
                yield name, _difference(partial(_facts, sources, wanted, opener), wanted)


def _facts(
    read: Callable[[], Sources], wanted: Mapping[str, Any], opener: ShardOpener
) -> dict[str, Any]:
    sources = read()
    facts = {key: fact(sources) for key, fact in _FACTS.items() if key in wanted}
    if "rows" not in wanted:
        return facts
    if "hub" in wanted:
        return facts | {"rows": sources[0].num_samples}
    counts = [len(open_source(each, opener=opener)) for each in sources]
    return facts | {"rows": len(draws_of(sources, counts, seed=_SEED))}


def _wrong_mixture(settings: Mapping[str, str], means: str, info: DatasetInfo) -> str | None:
    """Whether a mixture of settings does not mean what is expected."""
    if "train_dataset_prob" not in settings:
        strategy = strategy_of(settings["mix_strategy"])
        sources = row_sources(settings.get("dataset", "talks,short"), info)
        if "interleave_probs" in settings:
            sources = weighted(sources, settings["interleave_probs"])
        draws_of(sources, [10, 6], strategy, seed=_SEED)
        return _difference(lambda: STOPPING[means], strategy)
    # Weights count by their proportions, 0 leaves a source out, and each source has one.
    paths = [RowSourceConfig(path=path) for path in settings["train_dataset_path"].split(",")]
    mixtures = [weighted(paths, each) for each in (settings["train_dataset_prob"], "8,2", "1,0")]
    drawn = [draws_of(each, [8, 8], "interleave_over", seed=_SEED) for each in mixtures]
    given, same, one = (each.sources.tolist() for each in drawn)
    if given != same or any(one):
        return f"weights draw the sources {given}, ten times as large ones {same}, and 1,0 {one}"
    return _not_refused(lambda: weighted(paths, "1"))


def _contents(opened: Callable[[Path], RowFile], path: Path) -> list[Any]:
    rows = opened(path)
    found = [rows.row(number) for number in range(len(rows))]
    # Enough to tell rows of different formats apart.
    if len({next(iter(row)) for row in found}) > 1:
        raise ValueError(f"{path} has rows of several formats")
    return [_content(row, rows.folder) for row in found]


def _content(row: Mapping[str, Any], folder: Path) -> tuple[list[tuple[str, str]], list[bytes]]:
    """Roles and texts of a row, with a tag for each picture, and the bytes of the pictures."""
    turns, pictures = [], []
    for message in to_canonical(row).messages:
        parts = message["content"]
        text = "".join(part.get("text", f"<{part['type']}>") for part in parts)
        turns.append((message["role"], text))
        pictures += [_picture(part["image"], folder) for part in parts if part["type"] == "image"]
    return turns, pictures


def _picture(image: Any, folder: Path) -> bytes:
    return image if isinstance(image, bytes) else (folder / image).read_bytes()


def _pairs(opened: Callable[[Path], RowFile], path: Path) -> list[list[str]]:
    """Question and answer of the rows of a table."""
    rows = opened(path)
    found = [rows.row(number) for number in range(len(rows))]
    questions = ["\n".join(filter(None, (row["instruction"], row["input"]))) for row in found]
    return [[question, row["output"]] for question, row in zip(questions, found, strict=True)]


def _difference(found: Callable[[], Any], wanted: Any) -> str | None:
    try:
        value = found()
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None if value == wanted else f"{value!r:.300} instead of {wanted!r:.300}"


def _not_refused(read: Callable[[], Any]) -> str | None:
    """What was read instead of an error for the user."""
    try:
        return f"it is not refused: {read()!r:.300}"
    except (ValueError, RuntimeError):
        return None


@contextmanager
def _opener() -> Iterator[ShardOpener]:
    """Opens files without leaving indexes beside them."""
    with tempfile.TemporaryDirectory() as cache:
        yield ShardOpener(Cache(cache))
