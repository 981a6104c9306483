"""The chat template of a folder: which file wins, named templates, special tokens."""

import json

import pytest

from paddle_vl.families.vlm.templates.template_files import read_folder_templates, special_tokens

JINJA, PROCESSOR, TOKENIZER = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
NESTED = "processor_config.json"


def write(folder, jinja=None, processor=None, tokenizer=None, nested=None, **more):
    for name, value in ((PROCESSOR, processor), (TOKENIZER, tokenizer), (NESTED, nested)):
        if value is not None:
            (folder / name).write_text(json.dumps({"chat_template": value} | more))
    if jinja is not None:
        (folder / JINJA).write_text(jinja)


def test_a_folder_without_a_template_has_none(tmp_path):
    (tmp_path / TOKENIZER).write_text("{}")
    assert read_folder_templates(tmp_path) is None


def test_the_processor_wins_over_the_own_file_and_that_over_the_tokenizer(tmp_path):
    """The order of AutoProcessor of transformers 5.24."""
    files = {"tokenizer": TOKENIZER, "jinja": JINJA, "processor": PROCESSOR, "nested": NESTED}
    for key, name in files.items():
        write(tmp_path, **{key: key})
        assert read_folder_templates(tmp_path) == (key, tmp_path / name, None)


def test_additional_templates_go_with_the_own_file_alone(tmp_path):
    """Beside chat_template.json AutoProcessor of transformers 5.24 ends with an error, and that of
    processor_config.json is all it has."""
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file")
    write(tmp_path, jinja="own", processor="old")
    with pytest.raises(RuntimeError, match="chat_template.json beside .*additional_chat_templates"):
        read_folder_templates(tmp_path)
    for value, tools in (("n", None), ({"default": "n", "tool_use": "t"}, "t")):
        write(tmp_path, nested=value)
        assert read_folder_templates(tmp_path) == ("n", tmp_path / NESTED, tools)


def test_named_templates_have_a_default_and_one_for_tools(tmp_path):
    entries = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(tmp_path, tokenizer=entries)
    assert read_folder_templates(tmp_path) == ("d", tmp_path / TOKENIZER, "t")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file")
    write(tmp_path, jinja="own")
    assert read_folder_templates(tmp_path) == ("own", tmp_path / JINJA, "file")


@pytest.mark.parametrize("value", [3, [], [{"name": "default"}], [{"name": "x", "template": "y"}]])
def test_an_entry_without_a_default_template_is_refused(tmp_path, value):
    write(tmp_path, tokenizer=value)
    with pytest.raises(RuntimeError, match=TOKENIZER):
        read_folder_templates(tmp_path)


def test_additional_templates_without_a_default_are_refused(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    with pytest.raises(RuntimeError, match="rag"):
        read_folder_templates(tmp_path)


def test_special_tokens_are_texts_or_objects_with_content(tmp_path):
    values = {
        "eos_token": {"content": "<e>", "lstrip": False},
        "pad_token": "<p>",
        "bos_token": None,
        "add_bos_token": True,
        "extra_special_tokens": {"image_token": "<i>"},
    }
    (tmp_path / TOKENIZER).write_text(json.dumps(values))
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "<u>", "pad_token": "old"}')
    assert special_tokens(tmp_path) == {
        "eos_token": "<e>",
        "pad_token": "<p>",
        "unk_token": "<u>",
        "image_token": "<i>",
    }
