"""`paddle-vl chat`.

Guarantees: answers are those to the whole conversation, through undo, retry, save and load; files
are found as terminals write their paths; a saved conversation is a row; in a terminal errors and
Ctrl-C do not end the chat, in a pipe they do; reasoning is dimmed or left out, and kept apart.
"""

import fcntl
import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest

from paddle_vl.cli.chat import _content, _Session
from paddle_vl.cli.main import main
from paddle_vl.config.families import family_of


@pytest.fixture(scope="module")
def trained(run_file):
    assert main(["train", str(run_file)]) == 0
    shutil.copyfile(run_file.parent / "images" / "1.png", run_file.parent / "b c.png")
    return run_file.with_name("out")


def test_answers_are_those_to_the_whole_conversation(trained, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(trained.parent)
    chat, a, b = family_of({}).ask("chat", trained / "final", None, {}), "images/0.png", "b c.png"
    messages, images, wanted = [{"role": "system", "content": "green red"}], [], []

    def talk(*lines):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        drawn = ["--max-new-tokens", "6", "--temperature", "9.0", "--seed", "2"]
        assert main(["chat", str(trained), *drawn]) == 0
        assert capsys.readouterr().out == "".join(f"{each}\n" for each in wanted)

    def ask(text, *files):
        messages.append({"role": "user", "content": text})
        images.extend(files)
        chat.more = {}
        settings = {"max_new_tokens": 6, "do_sample": True, "temperature": 9.0, "seed": 2}
        wanted.append(chat.ask(messages, images, **settings))
        messages.append({"role": "assistant", "content": wanted[-1]})

    ask("<image>Which colour?", a)
    ask("Sure?")
    del messages[-2:]
    ask("<image>First: <image> Please. <image>", b, a, b)
    wanted.append(wanted[-1])
    assert all(wanted)
    saved = tmp_path / "talk.jsonl"
    talk(
        "/system green red", f"{a} Which colour?", "Sure?", "/undo", "/image b c.png",
        f"First: {a} Please. '{b}'", "/retry", f"/save {saved}", "", "/exit", "no more",
    )  # fmt: skip
    assert main(["evaluate", str(trained), "--data", str(saved), "--max-new-tokens", "1"]) == 0
    assert "of 2)" in capsys.readouterr().out
    wanted.clear()
    ask("Sure?")
    talk(f"/load {saved}", "Sure?")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("'b c.png' What?", ["b c.png", "What?"]),
        (r"What is b\ c.png?", ["What is ", "b c.png", "?"]),
        ("What's \"b c.png\", d.MP4 or it's?", ["What's ", "b c.png", ", ", "d.MP4", " or it's?"]),
        ("file://{folder}/b%20c.png d.MP4 ?", ["b c.png", "d.MP4", "?"]),
        (r"'{folder}/it'\''s.jpg'", ["it's.jpg"]),
        (f"Are ~5 of {'A' * 999} in ~x.png?", [f"Are ~5 of {'A' * 999} in ~x.png?"]),
        ("Open x.png or d.MP4.bak or e.txt?", ["Open x.png or d.MP4.bak or e.txt?"]),
    ],
)
def test_files_are_found_as_terminals_write_them(line, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = [{"type": "text", "text": part} for part in parts]
    for name, kind in {"b c.png": "image", "d.MP4": "video", "it's.jpg": "image"}.items():
        (tmp_path / name).touch()
        part = {"type": kind, kind: str(tmp_path / name)}
        wanted = [part if each.get("text") == name else each for each in wanted]
    assert _content(line.replace("{folder}", str(tmp_path))) == wanted


def test_an_error_ends_a_chat_without_a_terminal(trained, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/sing\nWhich colour?"))
    assert main(["chat", str(trained)]) == 1
    captured = capsys.readouterr()
    assert "error: there is no command /sing: /help shows them" in captured.err
    assert captured.out == ""


def test_a_terminal_goes_on_after_errors_and_ctrl_c(trained, tmp_path):
    model, endless = tmp_path / "model", {"min_new_tokens": 99999, "max_new_tokens": 99999}
    shutil.copytree(trained / "final", model)
    (model / "generation_config.json").write_text(json.dumps(endless))
    terminal, side = pty.openpty()

    def prepare() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        # A shell starts commands in the background with SIGINT ignored, and children inherit it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-m", "paddle_vl", "chat", str(model), "--temperature", "9"],
        stdin=side, stdout=side, stderr=side, start_new_session=True,
        preexec_fn=prepare, cwd=tmp_path, env=os.environ | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(side)

    def until(text: bytes, sent: bytes = b"") -> bytes:
        os.write(terminal, sent)
        shown, deadline = b"", time.monotonic() + 120
        while not shown or text not in shown:
            if select.select([terminal], [], [], 5)[0]:
                shown += os.read(terminal, 4096)
            elif sent == b"\x03":
                # Python's readline misses a signal that comes just before it waits for input.
                os.write(terminal, sent)
            assert time.monotonic() < deadline, shown
        return shown

    try:
        until(b"> ")
        assert b"error: there is no file" in until(b"\n> ", b"./none.png\r")
        assert b"error: there is no answer yet" in until(b"\n> ", b"/save a.jsonl\r")
        assert b"/retry" in until(b"\n> ", b"/help\r")
        until(b"half a line", b"half a line")
        until(b"\n> ", b"\x03")
        # The beginning of an answer stays. Up twice is the last message.
        for message, file in ((b"Which?", b"a.jsonl"), (b"\x1b[A\x1b[A", b"b.jsonl")):
            until(b"?\r\n", message + b"\r")
            until(b"")
            until(b"\n> ", b"\x03")
            until(b"\n> ", b"/save " + file + b"\r")
        os.write(terminal, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(terminal)
    first, second = (json.loads((tmp_path / f"{name}.jsonl").read_text()) for name in "ab")
    assert [len(row["messages"]) for row in (first, second)] == [2, 4]
    assert first["messages"] == second["messages"][:2]


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
