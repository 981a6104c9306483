"""List the files that one batch passes, from its line of a data file to the update.

    python tools/trace_batch.py                            # a tiny run of Qwen3-VL
    python tools/trace_batch.py RUN.yaml --text "pick up"  # any run with a JSONL file

The tool trains the run in this process, with the loader in it too and with the kernels that a
command uses, and traces every call of the second step until the parameters are updated. A file
counts if one of its functions takes a piece of the batch or gets one back from a call: a line of
the data file, an image, an array or a tensor. Files that see only sizes and settings are left out.
"""

import argparse
import contextlib
import inspect
import logging
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import paddle
from PIL import Image

import paddle_vl
from faults.tiny_run import write_tiny_run
from paddle_vl.config.load import load_run_config
from paddle_vl.nn.cpu import compiled
from paddle_vl.train.build import build_trainer

PACKAGE = Path(paddle_vl.__file__).parent
# In every line of the tiny run's data.
TEXT = "Which colour?"
_PIECES = (np.ndarray, paddle.Tensor, Image.Image)


@dataclass
class PassedFiles:
    """Files in the order in which the batch reaches them, each with its first function.

    Attributes:
        text: part of the texts of a batch.
    """

    text: str = TEXT
    first: dict[str, str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    is_updated: bool = False

    def watch(self, frame: FrameType, event: str, value: Any) -> None:
        """Callback for `sys.setprofile`."""
        if event not in ("call", "return"):
            return
        name = _file_of(frame)
        if name is None:
            return
        if event == "return" and frame.f_code.co_name == "train_step":
            self.is_updated = True
        if self.is_updated:
            return
        if event == "call":
            self.calls[name] = self.calls.get(name, 0) + 1
        # A return value goes to the caller too.
        frames = [frame] if event == "call" else [frame, frame.f_back]
        places = {_file_of(each): each.f_code for each in frames if each is not None}
        places.pop(None, None)
        if not places.keys() <= self.first.keys() and self._carries(_values(frame, event, value)):
            for each, code in places.items():
                # co_qualname needs Python 3.11.
                self.first.setdefault(str(each), getattr(code, "co_qualname", code.co_name))

    def _carries(self, values: Any, depth: int = 6) -> bool:
        """Whether values, or containers among them, hold a piece of a batch."""
        for value in values:
            if isinstance(value, _PIECES):
                return True
            if isinstance(value, str | bytes):
                text = value if isinstance(value, str) else value.decode(errors="replace")
                if self.text in text:
                    return True
            elif depth and isinstance(value, dict):
                if self._carries(value.values(), depth - 1):
                    return True
            elif depth and isinstance(value, list | tuple):
                if self._carries(value[:8], depth - 1):
                    return True
            elif depth and hasattr(value, "__dataclass_fields__") and self._carries(
                vars(value).values() if hasattr(value, "__dict__") else (), depth - 1
            ):  # fmt: skip
                return True
        return False


def _file_of(frame: FrameType) -> str | None:
    """The file of a frame's function within the package; None outside of it."""
    file = Path(frame.f_code.co_filename)
    return file.relative_to(PACKAGE).as_posix() if file.is_relative_to(PACKAGE) else None


def _values(frame: FrameType, event: str, value: Any) -> list[Any]:
    if event == "return":
        return [value]
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[:count]
    return [frame.f_locals[name] for name in names if name != "self" and name in frame.f_locals]


def passed_files(run: Path | None = None, text: str = TEXT) -> PassedFiles:
    """The files that the batch of the second step of a run passes.

    Args:
        run: its settings; None for a tiny run of Qwen3-VL.
        text: part of every text of its data.
    """
    passed = PassedFiles(text)
    with tempfile.TemporaryDirectory() as folder:
        settings = ["data.num_workers=0", "logging.progress_bar=false"]
        config = load_run_config(run or write_tiny_run(Path(folder)), settings)
        trainer = build_trainer(config, writes=False)
        with contextlib.closing(trainer.feed):
            trainer.train_one_step()
            threading.setprofile(passed.watch)
            sys.setprofile(passed.watch)
            try:
                trainer.train_one_step()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN.yaml")
    parser.add_argument("--text", default=TEXT, help="part of every text of the data")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    compiled.enable()
    passed = passed_files(options.run, options.text)
    for number, (name, function) in enumerate(passed.first.items(), 1):
        print(f"{number:3}  {name:50} {function}")
    others = sorted(set(passed.calls) - set(passed.first))
    print(f"{len(passed.first)} files; beside them, without the batch: {', '.join(others)}")


if __name__ == "__main__":
    main()
