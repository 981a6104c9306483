"""Chat templates that are damaged or odd, and rows whose texts are template code."""

import copy
import json
from collections.abc import Sequence
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
from paddle_vl.families.vlm.inputs.conversation import Conversation
from paddle_vl.families.vlm.inputs.tokenizer import VideoPrompt
from paddle_vl.families.vlm.templates import environment
from paddle_vl.families.vlm.templates.built_in import JINJA_TEMPLATE
from paddle_vl.families.vlm.templates.encoding import TemplateEncoder
from paddle_vl.families.vlm.templates.rendering import ChatTemplateRenderer
from paddle_vl.families.vlm.templates.template_files import read_folder_templates, special_tokens

_FOLDER = GOLDEN / "templates"
_NAME, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_VIDEO = VideoPrompt((0.0, 1.0), 4)
# Rows are rendered many times, each within this limit.
_SECONDS = 0.2
# Characters of a text and steps of a rendering: harmless templates meet a limit too.
_LIMIT = 20_000
_DEEP = ["{{" + "(" * 300, "{% if 1 %}" * 90, "{{ x" + ".y" * 300 + " }}", "{{ 'a' + " * 300,
         "{{ 'a'" + "~'a'" * 300 + " }}", "{{ 0x" + "f" * 5000 + " }}", "\0"]  # fmt: skip


def _sources() -> dict[str, str]:
    golden = {file.stem: file.read_text() for file in sorted(_FOLDER.glob("jinja/*.jinja"))}
    return {"built_in": JINJA_TEMPLATE, **golden}


def _small_templates() -> list[str]:
    cases = json.loads((_FOLDER / "environment.json").read_bytes())
    small = [case["template"] for case in cases["cases"].values()]
    return [*small, *cases["refused_with_lowered_limits"]["templates"]]


def _opened(folder: Path) -> TemplateEncoder:
    """The encoder of the template in a folder."""
    environment.MAX_SECONDS = _SECONDS
    environment.MAX_TEXT = environment.MAX_STEPS = _LIMIT
    found = read_folder_templates(folder)
    if found is None:
        raise RuntimeError(f"{folder} has no chat template")
    now, tokens, name = datetime(2026, 1, 1), special_tokens(folder), f"{found.file}"
    renderer = ChatTemplateRenderer(found.source, now, tokens, found.tools_source, name=name)
    tokenizer = Tokenizer.from_file(str(_FOLDER / "tokenizer" / "tokenizer.json"))
    return TemplateEncoder(renderer, tokenizer, "drop")


def check_row(row: dict[str, Any], encoders: Sequence[TemplateEncoder]) -> BadSampleError | None:
    """Encode a row; the refusal if no encoder takes it."""
    refused, kept = [], copy.deepcopy(row)
    for encoder in encoders:
        try:
            with sample_at("rows.jsonl:1"):
                counts = [str(row).count(f"'{kind}':") for kind in ("image", "video")]
                encoder.encode(_conversation(row), [4] * counts[0], [_VIDEO] * counts[1])
        except BadSampleError as error:
            refused.append(error)
            continue
        if row != kept:
            raise AssertionError("a template changed the row")
        # Without code the text must be the same but for the characters of code.
        texts = [encoder.text(_conversation(each)) for each in (row, _harmless(row))]
        if texts[0].translate(_HARMLESS) != texts[1].translate(_HARMLESS):
            raise AssertionError("a text of the row acts on the template")
    return refused[0] if len(refused) == len(encoders) else None


def _conversation(row: dict[str, Any]) -> Conversation:
    """A row in the canonical form."""
    return Conversation.of(
        row["messages"], row.get("tools", ()), row.get("chat_template_kwargs", {})
    )


_HARMLESS = str.maketrans("{}%#", "\ue001\ue002\ue003\ue004")


def _harmless(value: Any) -> Any:
    """A row without template code."""
    if isinstance(value, dict):
        return {_harmless(key): _harmless(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_harmless(each) for each in value]
    return value.translate(_HARMLESS) if isinstance(value, str) else value


def chat_templates(folder: Path) -> Parser:
    """The template of a folder with rows of all kinds; at least one must be encoded."""
    given = json.loads((_FOLDER / "conversations.json").read_bytes())
    names = ("plain", "system", "tool_call_parallel", "reasoning_history")
    rows = [to_canonical(given[name]).to_dict() for name in names]
    config = json.loads((_FOLDER / "tokenizer" / _CONFIG).read_bytes())
    sources = _sources()
    (folder / _NAME).write_text(sources["built_in"])
    (folder / _CONFIG).write_bytes(as_json(config))

    def parse() -> None:
        encoder = _opened(folder)
        refused = [error for row in rows if (error := check_row(row, [encoder]))]
        if len(refused) == len(rows):
            raise refused[0]

    odd = [*_DEEP, *_small_templates()]
    snippets, whole = [[each.encode() for each in texts] for texts in (odd, sources.values())]
    code = st.sampled_from(snippets) | damaged_text(snippets)

    @st.composite
    def with_code(draw) -> bytes:
        """Code before a block of a template."""
        blocks = draw(st.sampled_from(whole)).split(b"{%")
        at = draw(st.integers(0, len(blocks) - 1))
        return b"{%".join([*blocks[:at], draw(code) + blocks[at], *blocks[at + 1 :]])

    files = in_file(_NAME, st.one_of(with_code(), with_code(), damaged_text(whole)))
    listed = [{"name": "default", "template": text} for text in sources.values()]
    configs = json_bytes([config, config | {"chat_template": listed}]).map(
        lambda content: {_CONFIG: content, _NAME: b"{{ bos_token }}" + whole[0]}
    )
    return Parser(st.one_of(files, files, files, configs), parse)


def template_rows(folder: Path) -> Parser:
    """Rows whose texts are template code; each is printed as any other text would be."""
    file, seeds, encoders = folder / "rows.jsonl", golden_rows(), []
    file.write_bytes(as_json(seeds[0]))
    for source in _sources().values():
        (folder / _NAME).write_text(source)
        encoders.append(_opened(folder))

    def parse() -> None:
        with sample_at("rows.jsonl:1"):
            row = to_canonical(parse_object(file.read_bytes(), "'messages'")).to_dict()
        if error := check_row(row, encoders):
            raise error

    code = [*_small_templates(), "{{ messages }}", "{% endfor %}", "#}", "{% generation %}"]
    return Parser(in_file(file.name, with_texts(seeds, code)), parse, ("rows.jsonl:1",))
