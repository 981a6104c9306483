"""Rows as other trainers write them, their files, lists of data sets, and chat templates.

Guarantees: see `checking.check`. What a row was read as is read as the same. A chat template
changes no row, and texts of a row never act as template code, whatever they are.
"""

import copy
import json
import shutil
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st
from tokenizers import Tokenizer

from paddle_vl.config.row_sources import STOPPING
from paddle_vl.data.corpus.cache import Cache
from paddle_vl.data.corpus.opener import ShardOpener
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.dialects import FORMATS
from paddle_vl.data.formats.keys import BOX_TOKENS, RowSettings
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.jsonl import BadSampleError, parse_object, sample_at
from paddle_vl.data.rows.dataset_info import DatasetInfo
from paddle_vl.data.rows.mixture import draws_of
from paddle_vl.data.rows.row_file import open_rows
from paddle_vl.data.rows.spelling import row_sources, strategy_of, weighted
from paddle_vl.families.vlm.templates import environment
from paddle_vl.families.vlm.templates.built_in import JINJA_TEMPLATE
from paddle_vl.families.vlm.templates.encoding import TemplateEncoder, VideoPrompt
from paddle_vl.families.vlm.templates.rendering import ChatTemplateRenderer
from paddle_vl.families.vlm.templates.template_files import read_folder_templates, special_tokens
from tests.single_card_tests.damaged.checking import check
from tests.single_card_tests.damaged.damage import (
    as_json,
    in_file,
    json_files,
    mutated,
    one_damaged,
    one_of,
    texts,
)
from tests.single_card_tests.damaged.test_damaged_data_files import forget_files
from tests.support.tiny import GOLDEN

CONTAINERS, MIXTURES = GOLDEN / "formats" / "containers", GOLDEN / "formats" / "mixtures"
TEMPLATES, TEMPLATE = GOLDEN / "templates", "chat_template.jinja"
LINE = 1 << 14
TOKENS = frozenset({"<|im_start|>", "<|im_end|>", "<|image_pad|>"})
PLAIN = RowSettings(control_tokens=TOKENS, image_size=lambda source: (64, 48))
MARKED = RowSettings("markers", True, [*BOX_TOKENS], TOKENS, image_size=lambda source: (64, 48))


@pytest.fixture(autouse=True)
def _lower_limits(monkeypatch):
    # Rows are rendered many times; characters of a text and steps of a rendering.
    monkeypatch.setattr(environment, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(environment, "MAX_TEXT", 20_000)
    monkeypatch.setattr(environment, "MAX_STEPS", 20_000)


def golden_rows() -> list[dict[str, Any]]:
    """Rows of every format."""
    files = sorted((GOLDEN / "formats").glob("*/rows.jsonl"))
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


def check_form(row: Any, settings: RowSettings, format: str | None = None) -> None:
    """Read a row; its canonical form must be one, and stay what it is."""
    form = to_canonical(row, settings, format=format).to_dict()
    try:
        again = to_canonical(form, settings).to_dict()
    except ValueError as error:
        raise AssertionError(f"what a row was read as is refused: {error}") from error
    assert again == form


def test_row_of_any_format(folder):
    """Read as every format; at least one must take it."""
    seeds, file = golden_rows(), folder / "rows.jsonl"
    file.write_bytes(as_json(seeds[0]))
    ways = [(each, name) for each in (PLAIN, MARKED) for name in (None, *FORMATS)]

    def parse() -> None:
        with sample_at("rows.jsonl:1"):
            row, refused = parse_object(file.read_bytes(), "'messages'"), []
            for way in ways:
                try:
                    check_form(row, *way)
                except BadSampleError as error:
                    refused.append(error)
            if len(refused) == len(ways):
                raise refused[0]

    check(folder, parse, in_file(file.name, json_files(seeds)), "rows.jsonl:1")


CELLS = [b'"', b'""', b",", b"\t", b"\n", b"\r", b"\xff", b"\0", b"\xef\xbb\xbf", b"[", b"{",
         b'"[""a.png""]"', b"../outside.png", b"x" * (LINE + 1)]  # fmt: skip
BRACES = ["{0..999999999}", "{0..99}" * 20, "{a,b}" * 60, "{9..0}", "{", "../{a,b}.tar"]
# What only YAML has.
ODD_YAML = [b"&a [*a]", b"!!python/object/apply:os.system ['id']", b"? {a: 1}\n: 2", b"2020-01-01",
            b"a: &b [x,x]\nc: &d [*b,*b]\ne: [*d,*d,*d]", b"train: !!set {a, b}"]  # fmt: skip


@pytest.mark.parametrize("kind", ["json", "csv", "tsv", "saved_dataset", "energon"])
def test_rows_in_a_file_or_folder(kind, folder):
    """Read as a new process would."""
    name, cache = f"alpaca.{kind}", folder / ".cache"
    cache.mkdir()
    if kind == "json":
        name = "rows.json"
        shutil.copy(CONTAINERS / name, folder)
        pretty = json.loads((CONTAINERS / "pretty.json").read_bytes())
        inputs = one_damaged(folder, "*", pretty)
    elif kind in ("csv", "tsv"):
        text = (CONTAINERS / name).read_bytes()
        (folder / name).write_bytes(text)
        media = b"query,response,images\n<image>x,y,a.png\n"
        inputs = in_file(
            name, texts([text, media.replace(b",", b"\t" if kind == "tsv" else b",")], CELLS)
        )
    elif kind == "saved_dataset":
        name = ""
        shutil.copytree(CONTAINERS / kind, folder, dirs_exist_ok=True)
        state = json.loads((folder / "state.json").read_bytes())
        more = [state | {"_split": "train"}, state | {"_indices_data_files": []},
                state | {"_data_files": [{"filename": "../outside.arrow"}]}]  # fmt: skip
        splits = in_file("dataset_dict.json", json_files([{"splits": ["train"]}]))
        inputs = st.one_of(
            one_damaged(folder, "state.json", *more), one_damaged(folder, "*.arrow"), splits
        )
    else:
        name, meta = "", folder / ".nv-meta"
        meta.mkdir()
        fields = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
        fields["field_map"] = {"image": "image.png", "conversation": "conversation.json"}
        good = ["rows-{000..000}.tar"]
        splits = [{"split_parts": {"train": good}, "exclude": []}]
        splits += [{"split_parts": {"train": [each]}, "exclude": []} for each in BRACES]
        splits += [{"split_parts": {"train": good}, "exclude": [each]} for each in BRACES]
        shutil.copy(CONTAINERS / "energon-000000.tar", folder / "rows-000.tar")
        (meta / "dataset.yaml").write_text(yaml.safe_dump(fields))
        (meta / "split.yaml").write_text(yaml.safe_dump(splits[0]))
        inputs = st.one_of(
            in_file(".nv-meta/dataset.yaml", yaml_files([fields])),
            in_file(".nv-meta/split.yaml", yaml_files(splits)),
            one_damaged(folder, "*.tar"),
        )

    def parse() -> None:
        forget_files()
        for file in cache.iterdir():
            file.unlink()
        rows = open_rows(folder / name, opener=ShardOpener(Cache(str(cache)), max_line_bytes=LINE))
        for number in range(min(len(rows), 20)):
            row = rows.row(number)
            with rows.at_place(number):
                check_form(row, PLAIN)

    check(folder, parse, inputs, str(folder))


def yaml_files(seeds: Sequence[Any]) -> Any:
    """Damaged JSON, which YAML takes too, and what only YAML has."""
    return st.one_of(json_files(seeds), json_files(seeds), st.sampled_from(ODD_YAML))


def test_lists_of_data_sets(folder):
    """A file of each trainer's, and a mixture of what it names."""
    names = ("dataset_info.json", "swift_dataset_info.json", "lf_v1.yaml")
    for name in (*names, "rows.jsonl", "alpaca.json"):
        shutil.copy(MIXTURES / name, folder / name)
    mixture = {"sources": "talks,short", "strategy": "interleave_over", "weights": "0.7,0.3"}
    (folder / "mixture.json").write_bytes(as_json(mixture))

    def parse() -> None:
        infos, refused = [DatasetInfo.read(folder / name) for name in names], []
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
    mixtures = in_file("mixture.json", st.fixed_dictionaries(keys).map(as_json))
    loaded = [yaml.safe_load((folder / name).read_bytes()) for name in names]
    infos = [in_file(name, yaml_files([seed])) for name, seed in zip(names, loaded, strict=True)]
    check(folder, parse, st.one_of(*infos, mixtures))


# The characters of template code, and ones that have no meaning in it.
HARMLESS = str.maketrans("{}%#", "\ue001\ue002\ue003\ue004")


def harmless(value: Any) -> Any:
    """A row without template code."""
    if isinstance(value, dict):
        return {harmless(key): harmless(each) for key, each in value.items()}
    if isinstance(value, list):
        return [harmless(each) for each in value]
    return value.translate(HARMLESS) if isinstance(value, str) else value


def template_sources() -> list[str]:
    return [JINJA_TEMPLATE, *(file.read_text() for file in sorted(TEMPLATES.glob("jinja/*.jinja")))]


def small_templates() -> list[str]:
    cases = json.loads((TEMPLATES / "environment.json").read_bytes())
    small = [case["template"] for case in cases["cases"].values()]
    return [*small, *cases["refused_with_lowered_limits"]["templates"]]


def encoder_of(folder: Path) -> TemplateEncoder:
    """The encoder of the template in a folder."""
    found = read_folder_templates(folder)
    if found is None:
        raise RuntimeError(f"{folder} has no chat template")
    now, tokens, name = datetime(2026, 1, 1), special_tokens(folder), f"{found.file}"
    renderer = ChatTemplateRenderer(found.source, now, tokens, found.tools_source, name=name)
    tokenizer = Tokenizer.from_file(str(TEMPLATES / "tokenizer" / "tokenizer.json"))
    return TemplateEncoder(renderer, tokenizer, "drop")


def conversation(row: dict[str, Any]) -> Conversation:
    """A row in the canonical form."""
    tools, variables = row.get("tools", ()), row.get("chat_template_kwargs", {})
    return Conversation(row["messages"], tools=tools, chat_template_kwargs=variables)


def refusal_of(row: dict[str, Any], encoders: Sequence[TemplateEncoder]) -> BadSampleError | None:
    """Encode a row; the refusal if no encoder takes it."""
    refused, kept = [], copy.deepcopy(row)
    for encoder in encoders:
        try:
            with sample_at("rows.jsonl:1"):
                counts = [str(row).count(f"'{kind}':") for kind in ("image", "video")]
                videos = [VideoPrompt((0.0, 1.0), 4)] * counts[1]
                encoder.encode(conversation(row), [4] * counts[0], videos)
        except BadSampleError as error:
            refused.append(error)
            continue
        assert row == kept, "a template changed the row"
        # Without code the text must be the same but for the characters of code.
        written = [encoder.text(conversation(each)) for each in (row, harmless(row))]
        assert written[0].translate(HARMLESS) == written[1].translate(HARMLESS), "a text acts"
    return refused[0] if len(refused) == len(encoders) else None


def test_chat_templates(folder):
    """The template of a folder with rows of all kinds; at least one must be encoded."""
    given = json.loads((TEMPLATES / "conversations.json").read_bytes())
    names = ("plain", "system", "tool_call_parallel", "reasoning_history")
    rows = [to_canonical(given[name]).to_dict() for name in names]
    config, sources = folder / "tokenizer_config.json", template_sources()
    (folder / TEMPLATE).write_text(sources[0])
    shutil.copy(TEMPLATES / "tokenizer" / config.name, folder)

    def parse() -> None:
        encoder = encoder_of(folder)
        refused = [error for row in rows if (error := refusal_of(row, [encoder]))]
        if len(refused) == len(rows):
            raise refused[0]

    deep = ["{{" + "(" * 300, "{% if 1 %}" * 90, "{{ x" + ".y" * 300 + " }}", "{{ 'a' + " * 300,
            "{{ 'a'" + "~'a'" * 300 + " }}", "{{ 0x" + "f" * 5000 + " }}", "\0"]  # fmt: skip
    code, whole = ([*map(str.encode, each)] for each in (deep + small_templates(), sources))

    @st.composite
    def with_code(draw) -> bytes:
        """Code before a block of a template."""
        blocks = one_of(draw, whole).split(b"{%")
        at, put = draw(st.integers(0, len(blocks) - 1)), draw(st.sampled_from(code) | texts(code))
        return b"{%".join([*blocks[:at], put + blocks[at], *blocks[at + 1 :]])

    files = in_file(TEMPLATE, st.one_of(with_code(), with_code(), texts(whole)))
    seed = json.loads(config.read_bytes())
    listed = [{"name": "default", "template": text} for text in sources]
    configs = json_files([seed, seed | {"chat_template": listed}]).map(
        lambda content: {config.name: content, TEMPLATE: b"{{ bos_token }}" + whole[0]}
    )
    check(folder, parse, st.one_of(files, files, configs))


def test_rows_whose_texts_are_template_code(folder):
    """Each is printed as any other text would be."""
    file, seeds, encoders = folder / "rows.jsonl", golden_rows(), []
    file.write_bytes(as_json(seeds[0]))
    for source in template_sources():
        (folder / TEMPLATE).write_text(source)
        encoders.append(encoder_of(folder))
    code = [*small_templates(), "{{ messages }}", "{% endfor %}", "#}", "{% generation %}"]

    def parse() -> None:
        with sample_at("rows.jsonl:1"):
            row = to_canonical(parse_object(file.read_bytes(), "'messages'")).to_dict()
        if error := refusal_of(row, encoders):
            raise error

    def with_code(value: Any, put: str, at: int) -> Any:
        """The document with code in its texts of more than a word."""
        if isinstance(value, dict):
            return {key: with_code(each, put, at) for key, each in value.items()}
        if isinstance(value, list):
            return [with_code(each, put, at) for each in value]
        is_text = isinstance(value, str) and " " in value
        return value[:at] + put + value[at:] if is_text else value

    rows = st.builds(with_code, mutated(seeds, 1), st.sampled_from(code), st.integers(0, 20))
    check(folder, parse, in_file(file.name, rows.map(as_json)), "rows.jsonl:1")
