"""A policy server in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def served(model: str, *options: str) -> Iterator[tuple[str, int]]:
    """The address of a server in a process of its own that is ready, and its process number."""
    command = [sys.executable, "-m", "paddle_vl", "serve-policy", model, "--port", "0", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    address, said = "", []
    try:
        for line in process.stderr:
            said.append(line)
            found = re.search(r"ws://\S+:\d+", line)
            address = found.group() if found else address
            if line.startswith("ready"):
                break
        else:
            raise RuntimeError("".join(said[-20:]))
        yield address, process.pid
    finally:
        process.terminate()
        process.communicate()
