"""`paddle-vl chat`: a conversation with a model in the terminal."""

import argparse
import json
import logging
import os
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from paddle_vl.cli import commands
from paddle_vl.cli.table import BASE, TEMPLATE, Command, model, refuse_given, switch

logger = logging.getLogger(__name__)
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
_VIDEOS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg", ".3gp", ".flv")
# Words, of which some are paths as terminals quote or escape them.
_WORD = re.compile(r"""(?<!\S)(?:'(?:[^']|'\\'')+'|"[^"]+"|(?:\\.|\S)+?(?=[.,;:!?)]*(?:\s|$)))""")


def chat(options: argparse.Namespace) -> int:
    """Answer messages until the input ends."""
    settings = commands.generation_settings(options)
    if (Path(options.model) / "export.json").is_file():
        refuse_given(options, [BASE, TEMPLATE], "an export has its own weights and chat template")
        from paddle_vl.export import load

        answers = load(options.model)
    else:
        commands.configure_runtime()
        folder, family = commands.family_of_model(options.model, options.base)
        answers = family.ask("chat", folder, options.base, options.chat_template_kwargs)
    if not hasattr(answers, "answer"):
        raise ValueError(f"{options.model} holds no conversations: give a model that answers")
    _Session(answers, settings, sys.stdout.isatty() and not options.hide_thinking).run()
    return 0


class _Session:
    """A conversation in the canonical form of `paddle_vl.data.formats`, with absolute paths."""

    def __init__(self, answers: Any, settings: dict[str, Any], shows_reasoning: bool):
        self._answers, self._settings = answers, settings
        self._shows_reasoning, self._is_terminal = shows_reasoning, sys.stdin.isatty()
        self._messages: list[Any] = []
        self.next_files: list[Any] = []

    def run(self) -> None:
        """Take lines until the input ends; in a terminal errors and Ctrl-C do not end it."""
        if self._is_terminal:
            # From its import on `input` edits lines and has a history.
            with suppress(ImportError):
                import readline  # noqa: F401
            logger.info("/help shows the commands; Ctrl-D ends the chat")
        while True:
            try:
                line = input("> " if self._is_terminal else "").strip()
                name, _, rest = line.partition(" ")
                if name in _COMMANDS:
                    _COMMANDS[name][1](self, rest)
                elif re.fullmatch(r"/\w*", name):
                    raise ValueError(f"there is no command {name}: /help shows them")
                elif line:
                    content, self.next_files = [*self.next_files, *_content(line)], []
                    self.ask(content)
            except (EOFError, SystemExit):
                return
            except (KeyboardInterrupt, ValueError, RuntimeError, OSError) as error:
                if not self._is_terminal:
                    raise
                logger.error(str(error) and f"error: {error}")

    def ask(self, content: list[Any]) -> None:
        """Print an answer; it stays, and the message, if any text of it has come."""
        messages = [*self._messages, {"role": "user", "content": content}]
        prompt = self._answers.processor.apply_chat_template(messages, add_generation_prompt=True)
        thinks, reasoning, answer = prompt.rstrip().endswith("<think>"), "", ""
        try:
            for piece in self._answers.answer(messages, **self._settings):
                # The end is one token, where models reason, and so in one piece.
                thought, end, text = piece.partition("</think>") if thinks else ("", "", piece)
                thinks = thinks and not end
                reasoning += thought
                if thought and self._shows_reasoning:
                    print(f"\033[2m{thought}\033[0m", end="", flush=True)
                text = text if answer else text.lstrip()
                answer += text
                print(text, end="", flush=True)
            print()
        finally:
            if answer:
                said = {"role": "assistant", "content": [_text_part(answer)]}
                thought = {"reasoning_content": reasoning.strip()} if reasoning.strip() else {}
                self._messages = [*messages, said | thought]
            else:
                logger.info("there is no answer: your message is taken back")

    def ask_task(self, name: str) -> None:
        """Ask for a task of the model, of the files given."""
        text = _text_part(self._answers.processor.task_prompt(name.strip()))
        content, self.next_files = [*self.next_files, text], []
        self.ask(content)

    def take_back(self) -> list[Any]:
        """Remove the user's last message and all after it; returns its content."""
        users = [i for i, message in enumerate(self._messages) if message["role"] == "user"]
        if not users:
            raise ValueError("there is no message yet: write one")
        removed, self._messages = self._messages[users[-1]], self._messages[: users[-1]]
        return removed["content"]

    def begin(self, text: str) -> None:
        """Forget everything; the text is the system's."""
        told = [{"role": "system", "content": [_text_part(text)]}]
        self._messages, self.next_files = told if text else [], []

    def save(self, path: str) -> None:
        """Write the conversation as a row."""
        from paddle_vl.files.text_file import write_text

        file = _path(path)
        if all(message["role"] != "assistant" for message in self._messages):
            raise ValueError("there is no answer yet: ask something first")
        if file.suffix != ".jsonl" or file.exists():
            raise ValueError(f"{file} exists or is no .jsonl file: name a new one")
        write_text(file, json.dumps({"messages": self._messages}, ensure_ascii=False) + "\n")

    def load(self, path: str) -> None:
        """Go on with the conversation of a row of any format."""
        from paddle_vl.data.formats.reader import to_canonical
        from paddle_vl.data.jsonl import MAX_LINE_BYTES, bounded_lines, parse_object

        file, first, num_rows = _path(path), b"", 0
        for _, _, line in bounded_lines(file, MAX_LINE_BYTES):
            first, num_rows = first or line, num_rows + 1
        row = to_canonical(parse_object(first, "'messages'"))
        for part in (part for message in row.messages for part in message["content"]):
            if (kind := part["type"]) != "text" and isinstance(part[kind], str):
                part[kind] = str(file.parent / part[kind])
            elif kind != "text" or row.tools:
                raise ValueError(f"{file} has tools, or images that are no files: a chat has none")
        self._messages = row.messages
        logger.info("row 1 of %d: %d messages", num_rows, len(row.messages))


# What each does, and the function of the session and the text behind the name.
_COMMANDS: dict[str, tuple[str, Any]] = {
    "/image": (
        "FILE: show it with the next message, which may name files too",
        lambda chat, path: chat.next_files.append(_file_part(_path(path))),
    ),
    "/task": (
        "NAME: ask for a task of the model, such as table, of these files",
        _Session.ask_task,
    ),
    "/system": ("TEXT: begin anew, with this text of the system", _Session.begin),
    "/retry": ("answer the last message again", lambda chat, _: chat.ask(chat.take_back())),
    "/undo": ("take the last message and its answer back", lambda chat, _: chat.take_back()),
    "/clear": ("begin anew, without one", lambda chat, _: chat.begin("")),
    "/save": ("FILE.jsonl: write a row that paddle-vl train reads", _Session.save),
    "/load": ("FILE.jsonl: go on with the conversation of the first row", _Session.load),
    "/help": (
        "show this",
        lambda *_: logger.info("\n".join(f"{n:8} {text}" for n, (text, _) in _COMMANDS.items())),
    ),
    "/exit": ("end, as Ctrl-D does; Ctrl-C ends an answer", lambda *_: sys.exit()),
}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _content(text: str) -> list[Any]:
    """The parts of a message, with files where their paths are."""
    parts, at = [], 0
    for word in _WORD.finditer(text):
        written = word.group()
        if not written.rstrip("'\"").lower().endswith(_IMAGES + _VIDEOS):
            continue
        path = _path(written)
        # A name alone may be a part of a question.
        if "/" in written or path.is_file():
            parts += [_text_part(text[at : word.start()]), _file_part(path)]
            at = word.end()
    parts = [part for part in (*parts, _text_part(text[at:])) if part.get("text", "file").strip()]
    # As in training data, no space follows files that come first.
    for part in [part for part in parts if part["type"] == "text"][:1]:
        part["text"] = part["text"].lstrip()
    return parts


def _file_part(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}: correct the path")
    kind = "video" if path.suffix.lower() in _VIDEOS else "image"
    return {"type": kind, kind: str(path)}


def _path(written: str) -> Path:
    """The absolute path of a file, of a path that may be quoted, escaped or a file:// address."""
    path = written.strip()
    is_quoted = path.startswith(("'", '"'))
    path = "".join(shlex.split(path)) if is_quoted else re.sub(r"\\(.)", r"\1", path)
    path = unquote(urlsplit(path).path) if path.startswith("file://") else path
    # Unlike `Path.expanduser` it leaves the names of unknown users.
    return Path(os.path.expanduser(path)).absolute()


CHAT = Command(
    chat,
    "talk with a model about images and videos",
    "Answer messages, which may have paths of images and videos, typed or dropped on the terminal; "
    "/help shows commands. Ctrl-C ends an answer, Ctrl-D the chat. Without a terminal every line "
    "of the input is a message, and an error ends the chat.",
    "example:\n  paddle-vl chat --model runs/digits",
    [
        model(),
        BASE,
        TEMPLATE,
        switch("--hide-thinking", "leave out the reasoning, which a terminal shows dimmed"),
        *commands.DECODING,
    ],
    commands.DECODING_TEXT,
    folders=("model",),
)
