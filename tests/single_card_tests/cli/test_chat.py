"""`paddle-vl chat`.

Guarantees: answers are those to the whole conversation, through undo, retry, a new beginning, save
and load; files are found as terminals write their paths; a saved conversation is a row; in a
terminal errors and Ctrl-C do not end the chat, in a pipe they do; reasoning is dimmed or left out
and kept apart; an export answers as its model does.
"""

import fcntl
import io
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest

from paddle_vl.cli.chat import _content, _Session
from paddle_vl.cli.main import main
from paddle_vl.families.qwen3_vl.recipe import Qwen3VLRecipe

LENGTH = 6


@pytest.fixture(scope="module")
def trained(run_file):
    assert main(["train", str(run_file)]) == 0
    shutil.copyfile(run_file.parent / "images" / "1.png", run_file.parent / "b c.png")
    return run_file.with_name("out")


def talk(monkeypatch, *lines: str, options=(), model="") -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    return main(["chat", str(model), "--max-new-tokens", str(LENGTH), *options])


def test_answers_are_those_to_the_whole_conversation(trained, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(trained.parent)
    chat = Qwen3VLRecipe.chat(trained / "final", None, {})
    a, b = "images/0.png", "b c.png"
    messages, images, wanted = [], [], []

    def ask(text, *files):
        messages.append({"role": "user", "content": text})
        images.extend(files)
        chat.more = {}
        wanted.append(chat.ask(messages, images, max_new_tokens=LENGTH))
        messages.append({"role": "assistant", "content": wanted[-1]})

    ask("<image>Which colour?", a)
    ask("Sure?")
    del messages[-2:]
    ask("<image>First: <image> Please. <image>", b, a, b)
    del messages[-2:], images[-3:]
    ask("<image>First: <image> Please. <image>", b, a, b)
    assert all(wanted)
    assert len(set(wanted)) > 1
    saved = tmp_path / "talk.jsonl"
    told = [
        f"{a} Which colour?", "Sure?", "/undo",
        "/image b c.png", "First: images/0.png Please. 'b c.png'", "/retry", f"/save {saved}",
    ]  # fmt: skip
    assert talk(monkeypatch, *told, "", "/exit", "no more", model=trained) == 0
    assert capsys.readouterr().out == "".join(f"{each}\n" for each in wanted)
    row = json.loads(saved.read_text())
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 2
    assert main(["evaluate", str(trained), "--data", str(saved), "--max-new-tokens", "6"]) == 0
    assert "100.00%  (2 of 2)" in capsys.readouterr().out
    wanted.clear()
    ask("Sure?")
    assert talk(monkeypatch, f"/load {saved}", "Sure?", model=trained) == 0
    assert capsys.readouterr().out == f"{wanted[0]}\n"
    messages[:] = [{"role": "system", "content": "green red"}]
    images.clear()
    ask("Which?")
    assert talk(monkeypatch, f"/load {saved}", "/system green red", "Which?", model=trained) == 0
    assert capsys.readouterr().out == f"{wanted[1]}\n"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("'b c.png' What?", ["b c.png", "What?"]),
        (r"What is b\ c.png?", ["What is ", "b c.png", "?"]),
        ("What's \"b c.png\", d.MP4 or it's?", ["What's ", "b c.png", ", ", "d.MP4", " or it's?"]),
        ("file://{folder}/b%20c.png d.MP4 ?", ["b c.png", "d.MP4", "?"]),
        (r"'{folder}/it'\''s.jpg'", ["it's.jpg"]),
        ("Open x.png or d.MP4.bak or e.txt?", ["Open x.png or d.MP4.bak or e.txt?"]),
    ],
)
def test_files_are_found_as_terminals_write_them(line, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b c.png", "d.MP4", "it's.jpg", "e.txt"):
        (tmp_path / name).touch()
    kinds = {"MP4": "video", "png": "image", "jpg": "image"}
    found = _content(line.replace("{folder}", str(tmp_path)))
    assert found == [
        {"type": kind, kind: str(tmp_path / part)}
        if (tmp_path / part).is_file() and (kind := kinds[part[-3:]])
        else {"type": "text", "text": part}
        for part in parts
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("What is ./none.png?", "there is no file"),
        ("/image none.png", "there is no file"),
        ("/sing", "there is no command /sing: /help shows them"),
        ("/undo", "there is no message yet"),
        ("/save talk.json", "exists or is no .jsonl file: name a new one"),
        ("/load none.jsonl", "none.jsonl does not exist"),
        ("<|im_end|>", "the special token <|im_end|>"),
    ],
)
def test_an_error_ends_a_chat_without_a_terminal(trained, line, message, monkeypatch, capsys):
    assert talk(monkeypatch, line, "Which colour?", model=trained) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_terminal_goes_on_after_errors_and_ctrl_c(trained, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(trained / "final", model)
    # Answers take minutes.
    (model / "generation_config.json").write_text(
        '{"min_new_tokens": 99999, "max_new_tokens": 99999}'
    )
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "paddle_vl", "chat", str(model), "--temperature", "9"],
        stdin=side, stdout=side, stderr=side, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), cwd=tmp_path,
    )  # fmt: skip
    os.close(side)

    def until(text: str, sent: str = "") -> str:
        os.write(terminal, sent.encode())
        shown, end = b"", time.monotonic() + 120
        while text.encode() not in shown or not shown:
            assert time.monotonic() < end, shown
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 4096)
        return shown.decode(errors="replace")

    try:
        until("> ")
        assert "error: there is no file" in until("\n> ", "./none.png\r")
        assert "/retry" in until("\n> ", "/help\r")
        until("\n> ", "half a line\x03")
        until("?\r\n", "Which colour?\r")
        until("")
        until("\n> ", "\x03")
        # The beginning of an answer stays. Up is the last message.
        until("\n> ", "/save a.jsonl\r")
        until("?\r\n", "\x1b[A\x1b[A\r")
        until("")
        until("\n> ", "\x03")
        until("\n> ", "/save b.jsonl\r")
        os.write(terminal, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(terminal)
    rows = [json.loads((tmp_path / name).read_text()) for name in ("a.jsonl", "b.jsonl")]
    assert [len(row["messages"]) for row in rows] == [2, 4]
    assert rows[0]["messages"] == rows[1]["messages"][:2]


@pytest.mark.parametrize("shows", [True, False])
def test_reasoning_is_dimmed_or_left_out_and_kept_apart(shows, capsys):
    processor = SimpleNamespace(apply_chat_template=lambda *_, **__: "assistant\n<think>\n")
    pieces = ["Hm", "m.", "\n</think>\n\n4", " </think>"]
    session = _Session(SimpleNamespace(processor=processor, answer=lambda _: pieces), {}, shows)
    session.ask([{"type": "text", "text": "2+2?"}])
    thought = "\033[2mHm\033[0m\033[2mm.\033[0m\033[2m\n\033[0m" if shows else ""
    assert capsys.readouterr().out == f"{thought}4 </think>\n"
    answer = session._messages[1]
    assert (answer["reasoning_content"], answer["content"][0]["text"]) == ("Hmm.", "4 </think>")
    # Cut off while it reasons.
    del pieces[2:]
    session.ask([{"type": "text", "text": "3+3?"}])
    assert len(session._messages) == 2
