"""The pages for people who bring data, docs/data.md and docs/coming_from.md.

Guarantees: every row that the page shows becomes what stands beside it; a row that cannot be used
is refused with its remedy; every format, every entry of a source and every strategy has its line;
every setting that the pages name exists, what they write in YAML is valid, and the name of another
trainer's setting leads to the same setting as its line; the settings beside another trainer's
options are loaded with their values.
"""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from PIL import Image

from paddle_vl.config.family_settings import settings_help
from paddle_vl.config.load import load_run_config
from paddle_vl.config.peer_names import PEERS, setting_for
from paddle_vl.config.row_sources import RowSourceConfig, Strategy
from paddle_vl.data.formats.canonical import Conversation, Message
from paddle_vl.data.formats.dialects import FORMATS
from paddle_vl.data.formats.keys import RowSettings
from paddle_vl.data.formats.reader import RowReader, to_canonical
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.settings import VLDataConfig
from paddle_vl.families.vlm.templates.built_in import IM_END
from paddle_vl.families.vlm.templates.encoding import TemplateEncoder
from tests.single_card_tests.config.test_load import MINIMAL
from tests.single_card_tests.families.qwen3_vl.chat_builders import assistant, tiny_tokenizer, user
from tests.single_card_tests.test_docs import ROOT, blocks, is_setting

DATA, COMING_FROM = ROOT / "docs/data.md", ROOT / "docs/coming_from.md"
PAGES = (DATA, COMING_FROM)
SIZE = (640, 480)
SETTING = re.compile(r"(?<![\w./])(?:data|train|model|parallel|logging)\.[a-z]\w*(?:\.[a-z]\w*)*")


def tables(page: Path) -> dict[str, list[list[str]]]:
    """The tables of a page: cells of each line, by the titles of the columns."""
    found: dict[str, list[list[str]]] = {}
    rows: list[list[str]] | None = None
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            rows = None
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if rows is None:
            rows = found.setdefault(" | ".join(cells), [])
        elif not all(set(cell) <= set("-: ") for cell in cells):
            rows.append(cells)
    return found


ROWS = tables(DATA)["format | row | becomes"]


def asked(question: str = "Open?", answer: str = "Yes.", **more: Any) -> dict[str, Any]:
    """A row of one question and its answer, and what more stands in it."""
    return {"messages": [user(question), assistant(answer)], **more}


def said(*texts: str) -> dict[str, Any]:
    """A row of ShareGPT: a question, and answers behind it."""
    roles = ("human", *["gpt"] * len(texts))
    turns = zip(roles, texts, strict=False)
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


DOOR, WIND = {"images": ["door.jpg"]}, {"role": "tool_call", "content": '{"name": "wind"}'}
# What is given, and the row, kind and end of the sentence of the refusal.
REFUSED: dict[str, tuple[Any, str, str]] = {
    "a preference": (
        asked(rejected_response="No."), "preference",
        "keep the answer to learn as the assistant's message, and remove the key",
    ),
    "a document": (
        {"text": "The tide rises."}, "corpus",
        "write the file as a source of documents, {path: ..., format: text}",
    ),
    "plain prompt and completion": (
        {"prompt": "Open?", "completion": "Yes."}, "ambiguous",
        "set data.format to query_response for a conversation",
    ),
    "tools, and no chat template in the checkpoint's folder": (
        asked(tools=[{"name": "tide"}]), "unsupported",
        "add its chat_template.jinja, or write them into the contents as text",
    ),
    "a call of an unknown tool": (
        {"messages": [user("Tide?"), WIND], "tools": [{"name": "tide"}]}, "bad_tool_call",
        "add its definition to 'tools', or correct the name",
    ),
    "an unknown key of a message": (
        {"messages": [user("Open?"), assistant("Yes.") | {"los": False}]}, "unknown_key",
        "(is 'loss' meant?)",
    ),
    "two columns of one name": (
        {"query": "Open?", "question": "Closed?", "response": "Yes."}, "ambiguous",
        "hide all but one",
    ),
    "fewer media than tags": (
        asked("<image><image>Same?", **DOOR), "tag_count",
        "they are matched in order and must be equal in number",
    ),
    "an image in an answer": (
        asked("Draw.", "<image>", **DOOR), "tag_count", "move it to a user or system message"
    ),
    "an address": (
        asked("<image>Open?", images=["https://example.com/door.jpg"]), "remote",
        "data.allow_remote",
    ),
    "a box outside of its image": (
        asked("<image>Where?", "<bbox>", objects={"bbox": [[64, 48, 700, 240]]}, **DOOR),
        "bad_box", "set data.clip_boxes to true",
    ),
    "a control token in a text": (
        asked("Say <|im_end|>."), "special_token", "remove or rewrite them"
    ),
    "answers that follow each other": (
        said("Open?", "Yes.", "Quite."), "bad_order", "questions and answers alternate"
    ),
    "no answer": ({"messages": [user("Open?")]}, "no_assistant", "add an answer"),
    "a list of packed rows": (
        [said("Open?", "Yes.")], "unsupported", "give the rows one by one, the run packs them"
    ),
}  # fmt: skip


def code(cell: str) -> str:
    """The content of a cell that is code."""
    found = re.fullmatch(r"`(.*)`", cell)
    assert found, cell
    return found[1]


def as_shown(row: Conversation) -> str:
    """A row as the page writes it."""
    lines = [f"`tools: {', '.join(tool['function']['name'] for tool in row.tools)}`"]
    lines = lines if row.tools else []
    for message in row.messages:
        text = f"`{message['role']}: {content(message)}`"
        lines.append(f"**{text}**" if message.get("loss") else text)
    return "<br>".join(lines)


def content(message: Message) -> str:
    """Reasoning, texts, media and calls of a message in one line."""
    shown = f"think({message['reasoning_content']})" if "reasoning_content" in message else ""
    for part in message["content"]:
        kind = part["type"]
        shown += part["text"] if kind == "text" else f"[{kind} {part[kind]}]"
    for call in message.get("tool_calls", ()):
        function = call["function"]
        shown += f"call {function['name']}({json.dumps(function['arguments'])})"
    return shown.replace("\n", "\\n")


@pytest.mark.parametrize(("named", "row", "becomes"), ROWS, ids=[row[0] for row in ROWS])
def test_rows_become_what_the_page_says(named: str, row: str, becomes: str):
    settings: dict[str, Any] = dict(re.findall(r"data\.(\w+): (\w+)", named))
    found = to_canonical(json.loads(code(row)), RowSettings(image_size=lambda _: SIZE, **settings))
    assert f"`{found.format}`" == named.split(",")[0]
    assert as_shown(found) == becomes


@pytest.mark.parametrize(("row", "kind", "says"), REFUSED.values(), ids=REFUSED)
def test_rows_are_refused_with_a_remedy(row: Any, kind: str, says: str, tmp_path: Path):
    Image.new("RGB", SIZE).save(tmp_path / "door.jpg")
    reader = RowReader(RowSettings(control_tokens={IM_END}))

    def used() -> None:
        conversation = reader(row, tmp_path)
        conversation.check_targets()
        TemplateEncoder(None, tiny_tokenizer().backend).check(conversation)

    with pytest.raises(BadSampleError) as refused:
        used()
    assert refused.value.kind == kind
    assert says in refused.value.reason


def test_every_format_has_a_row():
    assert {code(named.split(",")[0]) for named, _, _ in ROWS} == {*FORMATS}


def test_every_entry_of_a_source_and_every_strategy_has_a_line():
    found = tables(DATA)
    sources = [rows for rows in found["entry | "] if rows]
    named = [name for cell, _ in sources for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(RowSourceConfig.model_fields)
    strategies = found["`data.mix_strategy` | rows before they are shuffled"]
    assert [code(cell.split(" ")[0]) for cell, _ in strategies] == list(get_args(Strategy))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_the_pages_name_exist(page: Path):
    named = set(SETTING.findall(page.read_text(encoding="utf-8"))) - {DATA.name}
    assert len(named) > 10
    assert [name for name in sorted(named) if not is_setting(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_data_in_yaml_is_valid(page: Path):
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`data\.(\w+: [^`]+)`", text)
    sections = [yaml.safe_load(block)["data"] for block in blocks(page, "yaml")]
    sections += [yaml.safe_load(each) for each in inline]
    assert len(sections) > 5
    for section in sections:
        VLDataConfig.model_validate(section)


def test_entries_that_make_a_pretraining_mix_or_not():
    said = re.search(r"or it has (.*?)\. So give", DATA.read_text(encoding="utf-8"), re.DOTALL)
    assert said
    named = re.findall(r"`(\w+)`", said[1])
    assert len(named) > 5
    values = {"only_columns": True, "tags": {"role_tag": "a"}, "subsets": ["a"], "ratio": 0.5}
    values |= {"split": "train", "folder": "a", "metrics": ["anls"]}
    for name in named:
        entry = {"path": "a", "format": "messages", name: values.get(name, 2)}
        assert isinstance(VLDataConfig.model_validate({"train": entry}).train[0], RowSourceConfig)
    others = RowSourceConfig.model_fields.keys() - {*named} - {"format"}
    some = {"path": "a", "name": "a", "columns": {"text": "a"}, "weight": 2}
    assert others == some.keys()
    assert not isinstance(VLDataConfig.model_validate({"train": some}).train[0], RowSourceConfig)


def options_of_trainers() -> list[tuple[str, str, str]]:
    """Trainer, and both cells of every line that has options beside settings."""
    found = []
    for section in COMING_FROM.read_text(encoding="utf-8").split("\n## ")[1:]:
        table = section.partition("| option | setting |\n")[2].partition("\n\n")[0]
        for line in table.splitlines()[1:]:
            _, theirs, ours, _ = line.split("|")
            found.append((section.partition("\n")[0], theirs.strip(), ours.strip()))
    return found


OPTIONS = options_of_trainers()


@pytest.mark.parametrize(("trainer", "theirs", "ours"), OPTIONS, ids=[row[1] for row in OPTIONS])
def test_options_of_other_trainers_are_the_settings_beside_them(tmp_path, trainer, theirs, ours):
    overrides = re.findall("`([^`]+)`", ours)
    file = ROOT / "configs/pi07/metaworld_cpu.yaml"
    if trainer != "LeRobot":
        file = tmp_path / "run.yaml"
        file.write_text(MINIMAL)
    config = load_run_config(file, overrides)
    for override in overrides:
        name, _, value = override.partition("=")
        wanted, found = yaml.safe_load(value), config
        for part in name.split("."):
            found = getattr(found, part)
        # YAML takes 1e-4 for a text.
        assert found == (float(wanted) if re.fullmatch(r"\d+e-\d+", value) else wanted), override
    settings = [name for _, _, descriptions in settings_help() for name in descriptions]
    named = [override.partition("=")[0] for override in overrides]
    for option in re.findall(r"`(?:--)?([\w.]+)", theirs):
        leads_to = {
            str(setting_for(part, settings)).partition("=")[0] for part in option.split(".")
        }
        assert leads_to & {*named}, f"{option}: {leads_to}"


def test_every_trainer_has_options():
    trainers = {"HF Trainer": 30, "Megatron-Bridge": 15, "LeRobot": 15}
    for trainer, least in trainers.items():
        assert sum(row[0] == trainer for row in OPTIONS) >= least


def test_values_that_the_page_writes_beside_other_names_are_valid(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL)
    tried = 0
    for here in re.findall(r"^\| .* \| (.*) \|$", COMING_FROM.read_text(encoding="utf-8"), re.M):
        for name, value in re.findall(r"`((?:model|train|parallel|data)\.\w+): ([^`]+)`", here):
            load_run_config(file, [f"{name}={value}"])
            tried += 1
    assert tried > 10


def test_names_of_other_trainers_lead_to_the_settings_of_their_lines():
    settings = [name for _, _, descriptions in settings_help() for name in descriptions]
    known = {name for names in PEERS.values() for name in names.split()}
    compared = 0
    for rows in tables(COMING_FROM).values():
        for theirs, here, *_ in rows:
            ours = SETTING.findall(here)
            for dotted in re.findall(r"`(?:--)?([\w.]+)", theirs):
                name = dotted.rpartition(".")[2]
                if ours and name in known:
                    compared += 1
                    assert str(setting_for(name, settings)).partition("=")[0] in ours, name
    assert compared > 20
