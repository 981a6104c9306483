"""Parsers with one planted fault each, for the fuzzer to find. Each input is a number in a file."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from hypothesis import strategies as st

from fuzzing.parser import Parser

# Inputs are the numbers from 0 to this one.
LARGEST = 200


def _of_numbers(
    folder: Path, fault: Callable[[int], object], named: tuple[str, ...] = ()
) -> Parser:
    file = folder / "number.json"
    file.write_text("0")

    def parse() -> None:
        number = json.loads(file.read_text())
        if number:
            fault(number)

    inputs = st.integers(0, LARGEST).map(lambda number: {"number.json": str(number).encode()})
    return Parser(inputs, parse, named)


def _planted(fault: Callable[[int], object]) -> Callable[[Path], Parser]:
    return lambda folder: _of_numbers(folder, fault)


def _missing(number: int) -> None:
    """For one in a hundred inputs; 12 is the smallest."""
    if number % 100 == 12:
        raise KeyError(number)


sound = _planted(lambda number: None)
rare_key_error = _planted(_missing)
sleeping = _planted(lambda number: time.sleep(0.3 if number > 195 else 0))
hanging = _planted(lambda number: time.sleep(1000 if number == 1 else 0))
allocating = _planted(lambda number: np.ones(6_000_000 if number > 180 else 1))
dying = _planted(lambda number: os.abort() if number > 197 else None)
# An error raised by another library, and an address that is looked up.
foreign = _planted(lambda number: np.zeros(2).reshape(3) if number > 180 else None)
resolving = _planted(lambda number: socket.getaddrinfo("127.0.0.1", 9) if number > 180 else None)


def wandering(folder: Path) -> Parser:
    outside = folder.parent / "outside.json"
    return _of_numbers(folder, lambda number: outside.read_text() if number > 180 else None)


def nameless(folder: Path) -> Parser:
    """A refusal by this package that does not name the file."""
    from paddle_vl.families.qwen3_vl.sizes import size_values

    def fault(number: int) -> None:
        if number > 180:
            size_values("another")

    return _of_numbers(folder, fault, ("number.json",))


def refusing_all(folder: Path) -> Parser:
    parser = sound(folder)
    (folder / "number.json").write_text("no number")
    return parser


def templating(folder: Path) -> Parser:
    """A template that runs the texts of a row."""
    from fuzzing.templates import check_row

    class Encoder:
        encode = staticmethod(lambda *_: None)

        @staticmethod
        def text(row: Any, *_: bool) -> str:
            return jinja2.Template(str(row.messages[0]["content"])).render()

    encoder: Any = Encoder()
    row = {"messages": [{"role": "user", "content": "{{ 6 * 7 }}"}]}
    return _of_numbers(folder, lambda number: check_row(row, [encoder]) if number > 180 else None)


def crowded(folder: Path) -> Parser:
    """Needs 0.4 s of a processor, which another process wants too."""

    def burn(number: int) -> None:
        if number < LARGEST - 1:
            return
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        end = time.process_time() + 0.4
        if not (rival := os.fork()):
            while True:
                continue
        while time.process_time() < end:
            continue
        os.kill(rival, signal.SIGKILL)
        os.waitpid(rival, 0)

    return _of_numbers(folder, burn)
