"""What data.train may name, and what it becomes."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paddle_vl.config.data_sources import has_sources
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.vlm.inputs import dataset
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from paddle_vl.families.vlm.inputs.open_data import open_conversations
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.rows_dataset import RowsDataset
from paddle_vl.families.vlm.settings import VLDataConfig
from tests.single_card_tests.families.qwen3_vl.chat_builders import tiny_processor

PROCESSOR = tiny_processor()
ROWS = [
    ("Which colour?", "red", "red.png"),
    ("And this?", "blue", "blue.png"),
    ("Sure?", "yes", None),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("red", "blue"):
        Image.new("RGB", (64, 48), name).save(folder / f"{name}.png")
    return folder


def messages_row(question, answer, image):
    tag = "<image>" if image else ""
    images = {"images": [image]} if image else {}
    turns = [{"role": "user", "content": tag + question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **images}


def sharegpt_row(question, answer, image):
    row = messages_row(question, answer, image)
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in row.pop("messages")]
    return {"conversations": turns, **row}


def opened(entries, processor=PROCESSOR, **settings):
    data = VLDataConfig(train=entries, **settings)
    assert not has_sources(data.train)
    return open_conversations(data.train, data, processor, seed=3)


def ids(data) -> list[tuple[list[int], list[int]]]:
    return [(each["input_ids"].tolist(), each["labels"].tolist()) for each in data]


def written(file: Path, rows) -> str:
    lines = file.suffix == ".jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    return str(file)


@pytest.fixture(scope="module")
def expected(folder):
    file = written(folder / "plain.jsonl", [messages_row(*row) for row in ROWS])
    data = opened([file])
    assert isinstance(data, MessagesDataset)
    return ids(data)


@pytest.mark.parametrize("build", [messages_row, sharegpt_row])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_every_format_and_container_gives_the_same_samples(folder, expected, build, name):
    data = opened([written(folder / f"{build.__name__}_{name}", [build(*row) for row in ROWS])])
    assert isinstance(data, RowsDataset if name.endswith(".json") else MessagesDataset)
    assert ids(data) == expected
    np.testing.assert_array_equal(data[0]["image_grid_thw"], [[1, 2, 4]])


def test_spellings_and_limits_of_sources_are_honoured(folder, expected):
    file = written(folder / "mixed.jsonl", [sharegpt_row(*row) for row in ROWS])
    assert ids(opened([f"{file}#2"])) == [expected[i] for i in opened_rows(f"{file}#2")]
    assert len(opened([f"{file}#7"])) == 7
    info = {"talks": {"file_name": "mixed.jsonl", "formatting": "sharegpt"}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    named = opened(["talks"], dataset_info=str(folder / "dataset_info.json"))
    assert ids(named) == expected
    short = opened([{"path": file, "max_length": 20, "max_pixels": 32 * 32}, file], max_length=100)
    with pytest.raises(BadSampleError, match="data.max_length is 20"):
        [short[number] for number in range(3)]
    assert len(short[3]["input_ids"]) == len(expected[0][0])


def opened_rows(entry):
    data = opened([entry])
    return [int(data.place(number).rpartition(":")[2]) - 1 for number in range(len(data))]


def test_rows_of_two_formats_in_a_file_are_refused(folder):
    rows = [messages_row(*ROWS[2]), {"query": "Sure?", "response": "yes"}]
    for name in ("two.jsonl", "two.json"):
        with pytest.raises(BadSampleError, match=r"two\.json.*2.*query_response.*messages"):
            opened([written(folder / name, rows)])


TOOLS = [{"name": "look", "parameters": {}}]
CALLS = [
    {"role": "user", "content": "tell"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
    {"role": "tool", "content": "blue"},
    {"role": "assistant", "content": "blue"},
]


def learned(processor, sample) -> str:
    return processor.decode(sample["labels"][sample["labels"] != -100], skip_special_tokens=False)


def test_tools_go_through_the_checkpoints_template(folder, tmp_path):
    PROCESSOR.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% if tools %}{{ tools[0].function.name }};{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    processor = VLProcessor.from_pretrained(tmp_path)
    (sample,) = opened(
        [written(folder / "t.json", [{"messages": CALLS, "tools": TOOLS}])], processor
    )
    text = processor.decode(sample["input_ids"], skip_special_tokens=False)
    assert text.startswith("look;<|im_start|>user\ntell<|im_end|>")
    assert learned(processor, sample) == "look{}<|im_end|>blue<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "rejected": "b", "prompt": "c"}, "preference"),
        ({"text": "a page"}, "format: text"),
        (messages_row("a <|im_end|> b", "c", None), "special token"),
        ({**messages_row("a", "b", None), "images": ["none.png"]}, "does not exist"),
    ],
)
@pytest.mark.parametrize("name", ["bad.jsonl", "bad.json"])
def test_what_cannot_be_trained_on_is_refused_at_the_start(folder, row, message, name):
    with pytest.raises(BadSampleError, match=message):
        opened([written(folder / name, [row])])


def test_names_of_nothing_are_refused(folder):
    with pytest.raises(ValueError, match="names no data"):
        opened(["talks#5"])


def test_of_a_long_file_the_first_lines_are_checked(folder, monkeypatch):
    rows = [messages_row(*ROWS[2]) for _ in range(6)]
    good = opened([written(folder / "long.jsonl", rows)])
    monkeypatch.setattr(dataset, "_MOST_CHECKED", 4)
    partly = opened([str(folder / "long.jsonl")])
    assert ids(partly) == ids(good)
    (whole, part) = good.contents[0], partly.contents[0]
    assert (part.lines, part.media, partly.fingerprint != good.fingerprint) == (
        whole.lines,
        "",
        True,
    )
    state = PrefetchLoader(good, list, 2, shuffle=True, drop_last=True).state_dict()
    PrefetchLoader(partly, list, 2, shuffle=True, drop_last=True).load_state_dict(state)
    rows[5] = {"query": "a"}
    late = opened([written(folder / "long.jsonl", rows)])
    assert len(late) == 6
    with pytest.raises(BadSampleError, match=r"long\.jsonl:6: "):
        late[5]
    with pytest.raises(ValueError, match="were added, removed or edited"):
        PrefetchLoader(late, list, 2, shuffle=True, drop_last=True).load_state_dict(state)
