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
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import paddle
from PIL import Image

import paddle_vl
from paddle_vl.config.load import load_run_config
from paddle_vl.nn.cpu import compiled
from paddle_vl.train.build import build_trainer
from signalled_runs import write_tiny_run

PACKAGE = Path(paddle_vl.__file__).parent
# In every line of the tiny run's data.
TEXT = "Which colour?"
_PIECES = (np.ndarray, paddle.Tensor, Image.Image)


def passed_files(run: Path | None = None, text: str = TEXT) -> dict[str, str]:
    """The files that the batch of the second step of a run passes, in the order in which it reaches
    them, each with its first function.

    Args:
        run: its settings; None for a tiny run of Qwen3-VL.
        text: part of every text of its data.
    """
    first: dict[str, str] = {}
    is_updated = False

    def watch(frame: FrameType, event: str, value: Any) -> None:
        nonlocal is_updated
        if event not in ("call", "return") or is_updated or _file_of(frame) is None:
            return
        is_updated = event == "return" and frame.f_code.co_name == "train_step"
        if is_updated:
            return
        # A return value goes to the caller too.
        frames = [frame] if event == "call" else [frame, frame.f_back]
        places = {_file_of(each): each.f_code for each in frames if each is not None}
        places.pop(None, None)
        values = [value] if event == "return" else _arguments(frame)
        if not places.keys() <= first.keys() and _carries(values, text):
            for each, code in places.items():
                # co_qualname needs Python 3.11.
                first.setdefault(str(each), getattr(code, "co_qualname", code.co_name))

    with tempfile.TemporaryDirectory() as folder:
        settings = ["data.num_workers=0", "logging.progress_bar=false"]
        config = load_run_config(run or write_tiny_run(Path(folder)), settings)
        trainer = build_trainer(config, writes=False)
        with contextlib.closing(trainer.feed):
            trainer.train_one_step()
            threading.setprofile(watch)
            sys.setprofile(watch)
            try:
                trainer.train_one_step()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
    return first


def _carries(values: Any, text: str, depth: int = 6) -> bool:
    """Whether values, or containers among them, hold a piece of a batch."""
    for value in values:
        inner: Any = ()
        if isinstance(value, _PIECES):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN.yaml")
    parser.add_argument("--text", default=TEXT, help="part of every text of the data")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    compiled.enable()
    for number, place in enumerate(passed_files(options.run, options.text).items(), 1):
        print(f"{number:3}  {place[0]:50} {place[1]}")


if __name__ == "__main__":
    main()
