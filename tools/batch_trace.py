"""The files that a batch passes, found by tracing calls; in a loader's workers too.

A file counts if one of its functions takes a piece of the batch or gets one back from a call: a
line of the data file, an image, an array or a tensor.
"""

import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import Image

PACKAGE = Path(__file__).resolve().parents[1] / "paddle_vl"
# By name, as workers do not import Paddle.
_PIECES, _TENSOR = (np.ndarray, Image.Image), "Tensor"


class Trace:
    """Calls of this process and of its threads that start while it is entered.

    Args:
        text: part of every text of the data.

    Attributes:
        first: by file, whether the main thread entered it first, and its function.
        is_on: whether calls of the main thread are looked at; those of others always are, as they
            bring the batches of later steps.
    """

    def __init__(self, text: str, ends_after: str = ""):
        self.text, self.ends_after = text, ends_after
        self.first: dict[str, tuple[bool, str]] = {}
        self.is_on = True

    @contextmanager
    def entered(self) -> Iterator["Trace"]:
        threading.setprofile(self._watch)
        sys.setprofile(self._watch)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _watch(self, frame: FrameType, event: str, value: Any) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        is_watched = event in ("call", "return") and (self.is_on or not is_main)
        if not is_watched or _file_of(frame) is None:
            return
        if event == "return" and frame.f_code.co_name == self.ends_after:
            self.is_on = False
            return
        # A return value goes to the caller too.
        frames = [frame] if event == "call" else [frame, frame.f_back]
        places = {_file_of(each): each.f_code for each in frames if each is not None}
        places.pop(None, None)
        values = [value] if event == "return" else _arguments(frame)
        if not places.keys() <= self.first.keys() and _carries(values, self.text):
            for each, code in places.items():
                # co_qualname needs Python 3.11.
                name = getattr(code, "co_qualname", code.co_name)
                self.first.setdefault(str(each), (is_main, name))


class TracedLoad:
    """A loader's function that a worker calls; what it passes there is written into a file."""

    def __init__(self, load: Callable[..., Any], text: str, file: Path):
        self.load, self.text, self.file = load, text, file

    def __call__(self, *arguments: Any) -> Any:
        with Trace(self.text).entered() as trace:
            made = self.load(*arguments)
        self.file.write_text(json.dumps(trace.first), encoding="utf-8")
        return made


def _carries(values: Any, text: str, depth: int = 6) -> bool:
    """Whether values, or containers among them, hold a piece of a batch."""
    for value in values:
        inner: Any = ()
        if isinstance(value, _PIECES) or type(value).__name__ == _TENSOR:
            return True
        if isinstance(value, str | bytes):
            if text in (value if isinstance(value, str) else value.decode(errors="replace")):
                return True
        elif isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, list | tuple):
            inner = value[:8]
        elif hasattr(value, "__dataclass_fields__") and hasattr(value, "__dict__"):
            inner = vars(value).values()
        if depth and _carries(inner, text, depth - 1):
            return True
    return False


def _file_of(frame: FrameType) -> str | None:
    """The file of a frame's function within the package; None outside of it."""
    file = Path(frame.f_code.co_filename)
    return file.relative_to(PACKAGE).as_posix() if file.is_relative_to(PACKAGE) else None


def _arguments(frame: FrameType) -> list[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[:count]
    return [frame.f_locals[name] for name in names if name != "self" and name in frame.f_locals]
