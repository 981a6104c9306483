"""Servers in processes of their own."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def served(model: str, *options: str) -> Iterator[tuple[str, int]]:
    """The address of a policy's server that is ready, and its process number."""
    command = [sys.executable, "-m", "paddle_vl", "serve-policy", model, "--port", "0", *options]
    with started(command, r"ws://\S+:\d+", r"^ready") as found:
        yield found


@contextmanager
def started(
    command: Sequence[str], address: str, ready: str, **environment: str
) -> Iterator[tuple[str, int]]:
    """The address of a server that is ready, and its process number.

    Args:
        address: pattern of it in what the server says.
        ready: pattern of the line that says that it is.

    Raises:
        RuntimeError: it ended before; has the end of its output.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), **environment},
    )
    assert process.stdout is not None
    found, said = "", []
    try:
        for line in process.stdout:
            said.append(line)
            match = re.search(address, line)
            found = match.group() if match else found
            if re.search(ready, line):
                break
        else:
            raise RuntimeError("".join(said[-20:]))
        # A full pipe would stop it.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield found, process.pid
    finally:
        process.terminate()
        process.wait()
