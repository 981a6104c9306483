"""Rows as other trainers write them: their formats, their files, and lists of data sets."""

import csv
import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from fuzzing.containers import forget_files
from fuzzing.mutations import as_json, damaged_bytes, damaged_text, in_file, json_bytes, mutated
from fuzzing.parser import Files, Parser
from paddle_vl.config.row_sources import STOPPING
from paddle_vl.data.corpus.cache import CacheFolders, LocalCopies
from paddle_vl.data.corpus.opener import ShardOpener
from paddle_vl.data.formats.canonical import check_canonical
from paddle_vl.data.formats.reader import FORMATS, recognised, to_canonical
from paddle_vl.data.formats.row_settings import BOX_TOKENS, RowSettings
from paddle_vl.data.jsonl import BadSampleError, parse_object, sample_at
from paddle_vl.data.rows.dataset_info import DatasetInfo
from paddle_vl.data.rows.mixture import draws_of
from paddle_vl.data.rows.row_file import open_rows
from paddle_vl.data.rows.spelling import row_sources, strategy_of, weighted

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"
_CONTAINERS, _MIXTURES = GOLDEN / "formats" / "containers", GOLDEN / "formats" / "mixtures"
_LINE, _MEBIBYTES = 1 << 14, 400
_CONTROL_TOKENS = frozenset({"<|im_start|>", "<|im_end|>", "<|image_pad|>"})
_SETTINGS = [
    RowSettings(control_tokens=_CONTROL_TOKENS, image_size=lambda source: (64, 48)),
    RowSettings("markers", True, [*BOX_TOKENS], _CONTROL_TOKENS, image_size=lambda _: (64, 48)),
]


def golden_rows() -> list[dict[str, Any]]:
    """Rows of every format."""
    files = sorted((GOLDEN / "formats").glob("*/rows.jsonl"))
    return [json.loads(line) for file in files for line in file.open("rb")]


def canonical_form(row: Any, settings: RowSettings, format: str | None = None) -> dict[str, Any]:
    """The canonical form of a row.

    Raises:
        AssertionError: it is none, or its own canonical form is another.
    """
    form = to_canonical(row, settings, format=format).to_dict()
    try:
        check_canonical(form)
        again = to_canonical(form, settings).to_dict()
    except ValueError as error:
        raise AssertionError(f"what a row was read as is refused: {error}") from error
    if again != form:
        raise AssertionError("what a row was read as is read as another")
    return form


def row_formats(folder: Path) -> Parser:
    """A row of any format, in its canonical form; read as each of the formats too."""
    seeds, file = golden_rows(), folder / "rows.jsonl"
    file.write_bytes(as_json(seeds[0]))

    def parse() -> None:
        with sample_at("rows.jsonl:1"):
            row = parse_object(file.read_bytes(), "'messages'")
            found = [_refusal(row, each, name) for each in _SETTINGS for name in (None, *FORMATS)]
            if all(found):
                raise found[0]

    return Parser(in_file(file.name, json_bytes(seeds)), parse, ("rows.jsonl:1",))


def _refusal(row: Any, settings: RowSettings, format: str | None) -> Any:
    try:
        canonical_form(row, settings, format)
    except BadSampleError as error:
        return error


def _reader(folder: Path, name: str = "") -> Callable[[], None]:
    """Reads every row of a file or folder as a new process would, and its canonical form."""
    cache = folder / ".cache"
    cache.mkdir(exist_ok=True)

    def parse() -> None:
        forget_files()
        for file in cache.iterdir():
            file.unlink()
        folders = CacheFolders(str(cache))
        opener = ShardOpener(folders, LocalCopies(folders), max_line_bytes=_LINE)
        rows = open_rows(folder / name, opener=opener, recognised=recognised)
        for number in range(min(len(rows), 20)):
            row = rows.row(number)
            with rows.at_place(number):
                canonical_form(row, _SETTINGS[0])

    return parse


def json_arrays(folder: Path) -> Parser:
    """A list of rows in one JSON file."""
    seeds = [json.loads((_CONTAINERS / name).read_bytes()) for name in ("rows.json", "pretty.json")]
    texts = [(_CONTAINERS / name).read_bytes() for name in ("rows.json", "pretty.json")]
    (folder / "rows.json").write_bytes(texts[0])
    odd = st.builds(lambda rows, end: as_json(rows) + end, mutated(seeds), st.sampled_from(_ENDS))
    inputs = st.one_of(json_bytes(seeds), damaged_text(texts), odd)
    return Parser(in_file("rows.json", inputs), _reader(folder, "rows.json"), ("rows",), _MEBIBYTES)


_ENDS = [b"", b"\n", b",", b"]", b"[]", b"{}", b"[" * 5000, b" " * (_LINE + 1), b"\0", b'"']
_CELLS = [b'"', b'""', b",", b"\t", b"\n", b"\r", b"\r\n", b"\xff", b"\0", b"\xef\xbb\xbf", b"=1+1",
          b"[", b'["cat.png"]', b'{"path": 1}', b"../outside.png", b"x" * (_LINE + 1)]  # fmt: skip


def text_tables(folder: Path) -> Parser:
    """CSV and TSV files."""
    seeds: dict[str, list[bytes]] = {".csv": [], ".tsv": []}
    flat = [row for row in golden_rows() if all(isinstance(v, str) for v in row.values())]
    for suffix, kind in ((".csv", "excel"), (".tsv", "excel-tab")):
        seeds[suffix].append((_CONTAINERS / f"alpaca{suffix}").read_bytes())
        (folder / f"rows{suffix}").write_bytes(seeds[suffix][0])
        for row in flat:
            text = io.StringIO()
            csv.writer(text, kind).writerows([[*row, "images"], [*row.values(), '["cat.png"]']])
            seeds[suffix].append(text.getvalue().encode())
    readers = [_reader(folder, f"rows{suffix}") for suffix in seeds]

    def parse() -> None:
        for read in readers:
            read()

    each = [
        in_file(f"rows{suffix}", st.sampled_from(texts) | damaged_text(texts, _CELLS))
        for suffix, texts in seeds.items()
    ]
    return Parser(st.one_of(each), parse, ("rows",), _MEBIBYTES)


def _one_damaged(
    folder: Path, texts: dict[str, st.SearchStrategy[bytes]], names: Sequence[str]
) -> st.SearchStrategy[Files]:
    """One file of a folder damaged: those with strategies by them, others in their bytes."""
    others = {name: damaged_bytes([(folder / name).read_bytes()]) for name in names}
    return st.one_of([in_file(name, contents) for name, contents in (texts | others).items()])


def arrow_folders(folder: Path) -> Parser:
    """A data set as Hugging Face's `datasets` saves it."""
    shutil.copytree(_CONTAINERS / "saved_dataset", folder, dirs_exist_ok=True)
    state = json.loads((folder / "state.json").read_bytes())
    seeds = [state, state | {"_split": "train"}, state | {"_indices_data_files": []}]
    shards = sorted(file.name for file in folder.glob("*.arrow"))
    splits = in_file("dataset_dict.json", json_bytes([{"splits": ["train", "../inputs"]}]))
    inputs = _one_damaged(folder, {"state.json": json_bytes(seeds)}, shards)
    return Parser(st.one_of(inputs, inputs, splits), _reader(folder), (str(folder),), _MEBIBYTES)


def energon_folders(folder: Path) -> Parser:
    """A data set of Megatron Energon."""
    shutil.copy(_CONTAINERS / "energon-000000.tar", folder / "rows-000.tar")
    (folder / ".nv-meta").mkdir()
    fields = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset",
              "field_map": {"image": "image.png", "conversation": "conversation.json"}}  # fmt: skip
    parts = {"split_parts": {"train": ["rows-{000..000}.tar"]}, "exclude": []}
    bombs = [
        "{0..999999999}",
        "{0..99}" * 20,
        "{a,b}" * 60 + ".tar",
        "{9..0}",
        "{}",
        "../{a,b}.tar",
    ]
    seeds = {"dataset": [fields, fields | {"field_map": None}], "split": [parts]}
    seeds["split"] += [{"split_parts": {"train": [bomb]}, "exclude": []} for bomb in bombs]
    seeds["split"] += [parts | {"exclude": [bomb]} for bomb in bombs]
    texts = {f".nv-meta/{name}.yaml": _yaml_files(each) for name, each in seeds.items()}
    for name, each in seeds.items():
        (folder / f".nv-meta/{name}.yaml").write_text(yaml.safe_dump(each[0]))
    inputs = _one_damaged(folder, texts, ["rows-000.tar"])
    return Parser(inputs, _reader(folder), (str(folder),), _MEBIBYTES)


def _yaml_files(seeds: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """YAML files: JSON that is damaged, which YAML takes too, and what only YAML has."""
    odd = [b"&a [*a]", b"!!python/object/apply:os.system ['id']", b"? {a: 1}\n: 2", b"2020-01-01",
           b"a: &b [x,x]\nc: &d [*b,*b]\ne: [*d,*d,*d]", b"- 1\n-2", b"train: !!set {a, b}"]  # fmt: skip
    whole = st.sampled_from([yaml.safe_dump(each).encode() for each in seeds])
    return st.one_of(json_bytes(seeds), json_bytes(seeds), whole, st.sampled_from(odd))


_WRITTEN = ["rows.jsonl", "rows.jsonl#4", "rows.jsonl#25", "talks,short", "talks%50,short#3",
            "hf::org/data:v1/v2#500", "ms://org/data@v2#3", "org/data", "rows.jsonl#999999999999",
            "rows.jsonl#99999999999999999999999", "short#" + "9" * 5000, "a\0b", "x" * 5000 + "#1",
            "../outside.json", "hf::../..", "talks%0", "#", "%", ",", "talks#4#4"]  # fmt: skip


def dataset_infos(folder: Path) -> Parser:
    """A file of data sets of each trainer, and a mixture of what it names."""
    names = ("dataset_info.json", "swift_dataset_info.json", "lf_v1.yaml")
    kinds = dict(zip(names, (json_bytes, json_bytes, _yaml_files), strict=True))
    valid = {name: (_MIXTURES / name).read_bytes() for name in names}
    for name in ("rows.jsonl", "alpaca.json"):
        shutil.copy(_MIXTURES / name, folder / name)
    mixture = {"sources": _WRITTEN[3], "strategy": "interleave_over", "weights": "0.7,0.3"}
    valid["mixture.json"] = as_json(mixture)
    for name, content in valid.items():
        (folder / name).write_bytes(content)

    def parse() -> None:
        infos = [DatasetInfo.read(folder / name) for name in names]
        refused, num_good = [], 0
        for info in infos:
            for name in info.entries:
                try:
                    info.source(name)
                    num_good += 1
                except ValueError as error:
                    refused.append(error)
        if not num_good:
            raise refused[0]
        with sample_at("mixture.json"):
            wanted = json.loads((folder / "mixture.json").read_bytes())
        sources = row_sources(wanted["sources"], infos[0])
        sources = weighted(sources, wanted["weights"]) if wanted["weights"] else sources
        draws_of(sources, [10] * len(sources), strategy_of(wanted["strategy"]), seed=1)

    texts = st.sampled_from(_WRITTEN) | st.text(max_size=20)
    texts = st.lists(texts, min_size=1, max_size=3).map(",".join)
    weights = st.sampled_from([None] * 3 + ["0.7,0.3", "1", "nan,1", "inf,1", "1e308,1e308", "0,0",
                                            "1e-320,1", "-1,2", ",", "1,1,1", "x"])  # fmt: skip
    strategies = st.sampled_from(["concat", *STOPPING, *STOPPING.values(), "random", ""])
    keys = {"sources": texts, "weights": weights, "strategy": strategies}
    inputs = [in_file(name, kind([_loaded(valid[name])])) for name, kind in kinds.items()]
    mixtures = st.fixed_dictionaries(keys).map(as_json)
    return Parser(st.one_of(*inputs, *[in_file("mixture.json", mixtures)] * 3), parse)


def _loaded(content: bytes) -> Any:
    return yaml.safe_load(content)
