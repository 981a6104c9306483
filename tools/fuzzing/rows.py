"""Rows as other trainers write them: their formats, their files, and lists of data sets."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from fuzzing.containers import forget_files
from fuzzing.mutations import as_json, damaged_bytes, damaged_text, in_file, json_bytes
from fuzzing.parser import Parser
from paddle_vl.config.row_sources import STOPPING
from paddle_vl.data.corpus.cache import Cache
from paddle_vl.data.corpus.opener import ShardOpener
from paddle_vl.data.formats.keys import BOX_TOKENS, RowSettings
from paddle_vl.data.formats.reader import FORMATS, to_canonical
from paddle_vl.data.jsonl import BadSampleError, parse_object, sample_at
from paddle_vl.data.rows.dataset_info import DatasetInfo
from paddle_vl.data.rows.mixture import draws_of
from paddle_vl.data.rows.row_file import open_rows
from paddle_vl.data.rows.spelling import row_sources, strategy_of, weighted

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"
_CONTAINERS, _MIXTURES = GOLDEN / "formats" / "containers", GOLDEN / "formats" / "mixtures"
_LINE, _MEBIBYTES = 1 << 14, 400
_TOKENS = frozenset({"<|im_start|>", "<|im_end|>", "<|image_pad|>"})
_PLAIN = RowSettings(control_tokens=_TOKENS, image_size=lambda source: (64, 48))
_MARKED = RowSettings("markers", True, [*BOX_TOKENS], _TOKENS, image_size=lambda source: (64, 48))


def golden_rows() -> list[dict[str, Any]]:
    """Rows of every format."""
    files = sorted((GOLDEN / "formats").glob("*/rows.jsonl"))
    return [json.loads(line) for file in files for line in file.open("rb")]


def _check_form(row: Any, settings: RowSettings, format: str | None = None) -> None:
    """Read a row; its canonical form must be one, and stay what it is."""
    form = to_canonical(row, settings, format=format).to_dict()
    try:
        again = to_canonical(form, settings).to_dict()
    except ValueError as error:
        raise AssertionError(f"what a row was read as is refused: {error}") from error
    if again != form:
        raise AssertionError("what a row was read as is read as another")


def row_formats(folder: Path) -> Parser:
    """A row of any format, read as every format; at least one must take it."""
    seeds, file = golden_rows(), folder / "rows.jsonl"
    file.write_bytes(as_json(seeds[0]))
    ways = [(each, name) for each in (_PLAIN, _MARKED) for name in (None, *FORMATS)]

    def parse() -> None:
        with sample_at("rows.jsonl:1"):
            row, refused = parse_object(file.read_bytes(), "'messages'"), []
            for way in ways:
                try:
                    _check_form(row, *way)
                except BadSampleError as error:
                    refused.append(error)
            if len(refused) == len(ways):
                raise refused[0]

    return Parser(in_file(file.name, json_bytes(seeds)), parse, ("rows.jsonl:1",))


def _parser(folder: Path, given: Mapping[str, st.SearchStrategy[bytes]], *names: str) -> Parser:
    """Reads the rows of files, or of the folder, as a new process would; one file is damaged."""
    cache = folder / ".cache"
    cache.mkdir()

    def parse() -> None:
        forget_files()
        for file in cache.iterdir():
            file.unlink()
        opener = ShardOpener(Cache(str(cache)), max_line_bytes=_LINE)
        for path in map(folder.joinpath, names or [""]):
            rows = open_rows(path, opener=opener)
            for number in range(min(len(rows), 20)):
                row = rows.row(number)
                with rows.at_place(number):
                    _check_form(row, _PLAIN)

    inputs = [in_file(name, contents) for name, contents in given.items()]
    return Parser(st.one_of(inputs), parse, (str(folder),), _MEBIBYTES)


def json_arrays(folder: Path) -> Parser:
    """A list of rows in one JSON file."""
    texts = [(_CONTAINERS / name).read_bytes() for name in ("rows.json", "pretty.json")]
    (folder / "rows.json").write_bytes(texts[0])
    odd = [b",", b"]", b"[]", b"{}", b"[" * 5000, b" " * _LINE, b"\0", b'"', b"\\", b"\xff"]
    inputs = st.one_of(json_bytes([*map(json.loads, texts)]), damaged_text(texts, odd))
    return _parser(folder, {"rows.json": inputs}, "rows.json")


def text_tables(folder: Path) -> Parser:
    """CSV and TSV files, with a column of paths."""
    odd = [b'"', b'""', b",", b"\t", b"\n", b"\r", b"\xff", b"\0", b"\xef\xbb\xbf", b"[", b"{",
           b'"[""a.png""]"', b"../outside.png", b"x" * (_LINE + 1)]  # fmt: skip
    inputs = {}
    for suffix, cell in ((".csv", b","), (".tsv", b"\t")):
        text = (_CONTAINERS / f"alpaca{suffix}").read_bytes()
        (folder / f"rows{suffix}").write_bytes(text)
        media = cell.join([b"query", b"response", b"images\n<image>x", b"y", b"a.png\n"])
        inputs[f"rows{suffix}"] = st.just(media) | damaged_text([text, media], odd)
    return _parser(folder, inputs, *inputs)


def arrow_folders(folder: Path) -> Parser:
    """A data set as Hugging Face's `datasets` saves it."""
    shutil.copytree(_CONTAINERS / "saved_dataset", folder, dirs_exist_ok=True)
    state = json.loads((folder / "state.json").read_bytes())
    seeds = [state, state | {"_split": "train"}, state | {"_indices_data_files": []}]
    outside = state | {"_data_files": [{"filename": "../outside.arrow"}]}
    texts = {"state.json": json_bytes([*seeds, outside])}
    texts["dataset_dict.json"] = json_bytes([{"splits": ["train"]}])
    shards = {file.name: damaged_bytes([file.read_bytes()]) for file in folder.glob("*.arrow")}
    return _parser(folder, texts | dict(sorted(shards.items())))


def energon_folders(folder: Path) -> Parser:
    """A data set of Megatron Energon."""
    (folder / ".nv-meta").mkdir()
    fields = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset",
              "field_map": {"image": "image.png", "conversation": "conversation.json"}}  # fmt: skip
    odd = ["{0..999999999}", "{0..99}" * 20, "{a,b}" * 60, "{9..0}", "{", "../{a,b}.tar"]
    named: list[list[str]] = [["rows-{000..000}.tar"], *([each] for each in odd)]
    splits: list[Any] = [{"split_parts": {"train": each}, "exclude": []} for each in named]
    splits += [{"split_parts": {"train": named[0]}, "exclude": each} for each in named[1:]]
    texts = {"dataset.yaml": _yaml_files(fields), "split.yaml": _yaml_files(*splits)}
    for name, value in (("dataset.yaml", fields), ("split.yaml", splits[0])):
        (folder / ".nv-meta" / name).write_text(yaml.safe_dump(value))
    content = (_CONTAINERS / "energon-000000.tar").read_bytes()
    (folder / "rows-000.tar").write_bytes(content)
    inputs = {f".nv-meta/{name}": each for name, each in texts.items()}
    return _parser(folder, inputs | {"rows-000.tar": damaged_bytes([content])})


def _yaml_files(*seeds: Any) -> st.SearchStrategy[bytes]:
    """Damaged JSON, which YAML takes too, and what only YAML has."""
    odd = [b"&a [*a]", b"!!python/object/apply:os.system ['id']", b"? {a: 1}\n: 2", b"2020-01-01",
           b"a: &b [x,x]\nc: &d [*b,*b]\ne: [*d,*d,*d]", b"train: !!set {a, b}"]  # fmt: skip
    whole = [yaml.safe_dump(each).encode() for each in seeds]
    return st.one_of(json_bytes(seeds), json_bytes(seeds), st.sampled_from([*whole, *odd]))


def dataset_infos(folder: Path) -> Parser:
    """A file of data sets of each trainer, and a mixture of what it names."""
    kinds = {"dataset_info.json": json_bytes, "swift_dataset_info.json": json_bytes,
             "lf_v1.yaml": lambda seeds: _yaml_files(*seeds)}  # fmt: skip
    for name in (*kinds, "rows.jsonl", "alpaca.json"):
        shutil.copy(_MIXTURES / name, folder / name)
    mixture = {"sources": "talks,short", "strategy": "interleave_over", "weights": "0.7,0.3"}
    (folder / "mixture.json").write_bytes(as_json(mixture))

    def parse() -> None:
        infos, refused = [DatasetInfo.read(folder / name) for name in kinds], []
        for info in infos:
            for name in info.entries:
                try:
                    info.source(name)
                except ValueError as error:
                    refused.append(error)
        if len(refused) == sum(len(info.entries) for info in infos):
            raise refused[0]
        wanted = json.loads((folder / "mixture.json").read_bytes())
        sources = row_sources(wanted["sources"], infos[0])
        sources = weighted(sources, wanted["weights"]) if wanted["weights"] else sources
        draws_of(sources, [10] * len(sources), strategy_of(wanted["strategy"]), seed=1)

    written = ["talks,short", "talks#4", "talks%50", "talks%0", "hf::org/data:v1/v2#500", "ms://a/b",
               "talks#999999999999", "short#" + "9" * 5000, "a\0b", "x" * 5000 + "#1", "hf::../..",
               "org/data", "../outside.json", "#", "%", "talks#4#4"]  # fmt: skip
    weights = [None, "0.7,0.3", "1", "nan,1", "inf,1", "1e308,1e308", "0,0", "1e-320,1", "-1,2",
               ",", "1,1,1", "x"]  # fmt: skip
    keys = {
        "sources": st.lists(st.sampled_from(written) | st.text(), max_size=3).map(",".join),
        "weights": st.sampled_from(weights),
        "strategy": st.sampled_from(["concat", *STOPPING, *STOPPING.values(), "random"]),
    }
    loaded = {name: yaml.safe_load((folder / name).read_bytes()) for name in kinds}
    infos = [in_file(name, kind([loaded[name]])) for name, kind in kinds.items()]
    mixtures = in_file("mixture.json", st.fixed_dictionaries(keys).map(as_json))
    return Parser(st.one_of(*infos, *[mixtures] * 3), parse)
