"""The chat template of a checkpoint's folder, and its special tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paddle_vl.files.text_file import read_json_object, read_text, shown

# File of transformers 5 with the settings of all processors, each under its name.
NESTED_CONFIG_FILE = "processor_config.json"
_MORE, _OLD_FILE = "additional_chat_templates", "chat_template.json"


class FolderTemplates(NamedTuple):
    """The chat templates of a folder.

    Attributes:
        source: the template.
        file: where it stands.
        tools_source: the template for conversations with tools, if it is another.
    """

    source: str
    file: Path
    tools_source: str | None


def read_folder_templates(folder: Path) -> FolderTemplates | None:
    """The templates of a folder; None if it has none.

    Raises:
        RuntimeError: a file cannot be read, an entry in it has another form, or HF reads it not
            beside `additional_chat_templates`.
    """
    more = {each.stem: _text(each) for each in sorted((folder / _MORE).glob("*.jinja"))}
    for file, named in stored_templates(folder):
        if more and file.name == _OLD_FILE:
            raise RuntimeError(
                f"{file} beside {folder / _MORE}: HF refuses both together; move the first's "
                "template to chat_template.jinja"
            )
        # HF has that of the processor's settings alone.
        named = named if file.name == NESTED_CONFIG_FILE else named | more
        if "default" not in named:
            raise RuntimeError(
                f"{file} has the chat templates {sorted(named)}; one must be named 'default'"
            )
        return FolderTemplates(named["default"], file, named.get("tool_use"))
    if more:
        raise RuntimeError(
            f"{folder / _MORE} has the chat templates {sorted(more)}, but {folder} has none for "
            "other conversations; add chat_template.jinja"
        )
    return None


def stored_templates(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Each file of a folder that has templates, and these by name, in the order in which
    transformers 5.24 takes them: the processor's files, the one for both, the tokenizer's.

    Raises:
        RuntimeError: a file cannot be read, or an entry in it has another form.
    """
    for name in (NESTED_CONFIG_FILE, _OLD_FILE, "chat_template.jinja", "tokenizer_config.json"):
        file = folder / name
        is_jinja = file.suffix == ".jinja" and file.is_file()
        value = _text(file) if is_jinja else _config(file).get("chat_template")
        if value is not None:
            yield file, _named(value, file)


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens by name (`eos_token`), which templates may print.

    Raises:
        RuntimeError: a file cannot be read.
    """
    tokens = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = _config(folder / name)
        extra = config.get("extra_special_tokens")
        for key, value in (config | (extra if isinstance(extra, dict) else {})).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                tokens[key] = text
    return tokens


def _named(value: Any, file: Path) -> dict[str, str]:
    """Templates by name of an entry: a text, these by name, or a list of names and texts."""
    if isinstance(value, str):
        return {"default": value}
    try:
        named = dict(value) if isinstance(value, dict) else {}
        named = named or {str(entry["name"]): entry["template"] for entry in value}
    except (TypeError, KeyError):
        named = {}
    if not named or not all(isinstance(text, str) for text in named.values()):
        raise RuntimeError(
            f"{file} has chat_template {shown(value)}; a text, or a list of objects with name and "
            "template is needed"
        )
    return named


def _text(file: Path) -> str:
    return read_text(file, "a chat template")


def _config(file: Path) -> dict[str, Any]:
    return read_json_object(file, "a checkpoint's configuration") if file.is_file() else {}
