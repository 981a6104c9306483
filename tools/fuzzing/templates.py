"""Chat templates that are damaged or hostile, and rows whose texts are template code."""

import copy
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import Tokenizer

from fuzzing.mutations import as_json, damaged_text, in_file, json_bytes, with_texts
from fuzzing.parser import Parser
from fuzzing.rows import GOLDEN, golden_rows
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.jsonl import BadSampleError, parse_object, sample_at
from paddle_vl.families.vlm.templates import environment
from paddle_vl.families.vlm.templates.built_in import JINJA_TEMPLATE
from paddle_vl.families.vlm.templates.encoding import TemplateEncoder, TemplateSettings
from paddle_vl.families.vlm.templates.rendering import ChatTemplateRenderer
from paddle_vl.families.vlm.templates.template_files import read_folder_templates, special_tokens

_FOLDER, _NOW = GOLDEN / "templates", datetime(2026, 1, 1)
# A row is rendered several times, each within this limit.
_SECONDS = 0.3
_BIG = "{% set b = 'a' * 1000000 %}"
_HOSTILE = [
    "{% include '/etc/passwd' %}", "{% import '../outside.json' as x %}", "{% extends 'x' %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os }}",
    "{{ messages.append(1) }}", "{{ messages[0].update(role='x') }}", "{{ messages[0].clear() }}",
    "{{ self.__init__.__globals__ }}", "{{ raise_exception.__globals__ }}", "{{ self._TemplateReference__context }}",
    "{{ '{0.__class__}'.format(1) }}", "{{ '%s' | format(strftime_now) }}", "{{ messages | attr('__len__') }}",
    "{{ strftime_now('%' * 9999) }}", "{{ strftime_now('\\ud800') }}", "{{ ('a' * 1000000) | wordwrap(1) }}",
    "{{ messages | tojson(indent=-1) }}", "{{ messages | groupby('role.x') }}", "{{ 1 / 0 }}", "{{ ~1 }}",
    "{{ range(10 ** 30) }}", "{{ 10 ** 4300 }}", "{{ ('9' * 5000) | int }}", "{{ 1e308 * 10 | int }}",
    "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}", "{{ messages | map('tojson') }}",
    "{% for i in range(99999) %}{{ messages }}{% endfor %}", "{% generation %}{% generation %}",
    "{% set n = namespace() %}{% set n.n = n %}{{ n }}", "{% macro f() %}{{ caller() }}{% endmacro %}",
    "{{ messages | sort(attribute='content') }}", "{{ messages | urlize }}", "{{ 'x' | center(99999999) }}",
    _BIG + "{{ b | urlize }}", _BIG + "{{ b | title }}", _BIG + "{{ b.split('a') }}", _BIG + "{{ b | list | unique }}",
    _BIG + "{{ b.encode() }}", _BIG + "{{ b | striptags }}", _BIG + "{{ b.partition('b') }}",
    _BIG + "{% for i in range(9999) %}{{ b in b }}{% endfor %}", _BIG + "{{ b | escape | forceescape }}",
    "{% set r = range(99999) | list %}{% for i in r %}{{ 1 if -1 in r }}{% endfor %}",
    "{{ range(99999) | list | batch(1) | list }}", "{{ '" + "<" * 99999 + "' | striptags }}",
    "{{ '" + "a.b@" * 20000 + "' | urlize }}", "{{ '" + "(" * 50000 + "' | urlize }}",
    "{{" + "(" * 3000 + "}}", "{% if 1 %}" * 300, "{{ x" + ".y" * 3000 + " }}", "{{ 'a'" + "~'a'" * 3000 + " }}",
    "{{ 'a' + " * 2000, "{#", "{% raw %}", "\0", "\ud800", "{{ 1_0_0 }}", "{{ 0x" + "f" * 5000 + " }}",
]  # fmt: skip


class _Templates:
    """Encodes rows with the template of a folder."""

    def __init__(self, folder: Path):
        # Only so is a deadline met within the time of one input.
        environment.MAX_SECONDS = _SECONDS
        self.tokenizer = Tokenizer.from_file(str(_FOLDER / "tokenizer" / "tokenizer.json"))
        self.folder = folder

    def opened(self) -> TemplateEncoder:
        found = read_folder_templates(self.folder)
        if found is None:
            raise RuntimeError(f"{self.folder} has no chat template")
        tokens = special_tokens(self.folder)
        renderer = ChatTemplateRenderer(
            found.source, _NOW, tokens, found.tools_source, name=f"the template in {found.file}"
        )
        return TemplateEncoder(renderer, self.tokenizer, TemplateSettings("drop"))


def _styles() -> dict[str, str]:
    golden = {file.stem: file.read_text() for file in sorted(_FOLDER.glob("jinja/*.jinja"))}
    return golden | {"built_in": JINJA_TEMPLATE}


def chat_templates(folder: Path) -> Parser:
    """The templates of a folder, with rows of all kinds; at least one must be encoded."""
    given = json.loads((_FOLDER / "conversations.json").read_bytes())
    names = ("plain", "system", "image_middle", "tool_call_parallel", "reasoning_history")
    rows = [_canonical(given[name]) for name in names]
    sources, templates = _styles(), _Templates(folder)
    config = json.loads((_FOLDER / "tokenizer" / "tokenizer_config.json").read_bytes())
    name, more = "chat_template.jinja", "tokenizer_config.json"
    (folder / name).write_text(sources["ernie_style"])
    (folder / more).write_bytes(as_json(config))

    def parse() -> None:
        encoder, refused = templates.opened(), []
        for row in rows:
            kept = copy.deepcopy(row)
            try:
                with sample_at(str(folder)):
                    encoder.encode(row, [4] * str(row).count("'image':"))
            except BadSampleError as error:
                refused.append(error)
            if row != kept:
                raise AssertionError("the template changed the row")
        if len(refused) == len(rows):
            raise refused[0]

    cases = json.loads((_FOLDER / "environment.json").read_bytes())
    small = [case["template"] for case in cases["cases"].values()]
    snippets = [_bytes(each) for each in _HOSTILE + small + cases["not_stopped_by_the_sandbox"]]
    whole = [_bytes(each) for each in sources.values()]
    damaged = st.one_of(damaged_text(whole), damaged_text(whole, snippets))
    behind = st.builds(
        lambda text, code: code + text, st.sampled_from(whole), damaged_text(snippets)
    )
    lists = [{"name": "default", "template": text} for text in sources.values()]
    configs = [config | {"chat_template": each} for each in (lists[0]["template"], lists[:2])]
    files = st.fixed_dictionaries(
        {name: st.one_of(damaged, damaged, behind, st.sampled_from(whole))}
    )
    entries = in_file(more, json_bytes([config, *configs]))
    return Parser(st.one_of(files, files, files, entries), parse, (str(folder),))


def _canonical(given: dict[str, Any]) -> dict[str, Any]:
    images = ["a.png"] * str(given).count("'image'")
    row = {"messages": given["messages"], "tools": given.get("tools"), "images": images}
    return to_canonical({key: value for key, value in row.items() if value}).to_dict()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# Of one length, and no part of template code.
_HARMLESS = {
    ord(code): other for code, other in zip("{}%#", "\ue001\ue002\ue003\ue004", strict=True)
}


def template_rows(folder: Path) -> Parser:
    """Rows whose texts are template code; each is printed as any other text would be."""
    kinds = ("messages", "query", "conversations", "instruction", "src", "prompt")
    seeds = [each for each in golden_rows() if any(key in each for key in kinds)]
    file, templates = folder / "rows.jsonl", _Templates(folder)
    file.write_bytes(as_json(seeds[0]))
    encoders = []
    for source in _styles().values():
        (folder / "chat_template.jinja").write_text(source)
        encoders.append(templates.opened())

    def parse() -> None:
        with sample_at("rows.jsonl:1"):
            row = to_canonical(parse_object(file.read_bytes(), "'messages'")).to_dict()
            refused = [_refusal(row, encoder) for encoder in encoders]
            if all(refused):
                raise refused[0]

    texts = [each for each in _HOSTILE if len(each) < 200] + [
        "{{ messages }}",
        "{% endfor %}",
        "#}",
    ]
    return Parser(in_file(file.name, with_texts(seeds, texts)), parse, ("rows.jsonl:1",))


def _refusal(row: Any, encoder: TemplateEncoder) -> Any:
    """Why a row is not encoded, if it is not.

    Raises:
        AssertionError: it is printed otherwise than if it had no template code.
    """
    count = sum(part["type"] == "image" for each in row["messages"] for part in each["content"])
    try:
        encoder.encode(row, [4] * count)
    except BadSampleError as error:
        return error
    text, other = (encoder.text(each, False, False) for each in (row, _harmless(row)))
    if text.translate(_HARMLESS) != other.translate(_HARMLESS):
        raise AssertionError("a text of the row acts on the template")


def _harmless(value: Any) -> Any:
    """A row without template code."""
    if isinstance(value, str):
        return value.translate(_HARMLESS)
    if isinstance(value, dict):
        return {_harmless(key): _harmless(each) for key, each in value.items()}
    return [_harmless(each) for each in value] if isinstance(value, list) else value
