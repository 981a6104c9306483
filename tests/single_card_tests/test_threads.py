"""Threads of the package.

Guarantees: no thread dies unnoticed. An error in a watch ends the process with its name and exit
code 1, an error in a joined thread is raised where it is joined, and the package starts no others.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paddle_vl
from paddle_vl.threads import JoinedThread

PACKAGE = Path(paddle_vl.__file__).parent
FAILING_WATCH = """
import time
from paddle_vl.threads import Watch
Watch([].pop, "some-watch").start()
time.sleep(60)
"""


def test_a_failing_watch_ends_the_process():
    done = subprocess.run([sys.executable, "-c", FAILING_WATCH], capture_output=True, text=True)
    assert done.returncode == 1
    assert "the thread some-watch failed" in done.stderr
    assert "IndexError: pop from empty list" in done.stderr


def test_a_failing_thread_raises_where_it_is_joined():
    thread = JoinedThread(target=[].pop)
    thread.start()
    with pytest.raises(IndexError, match="pop from empty list"):
        thread.join()


def test_there_are_no_other_threads():
    started = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and (isinstance(node.func, ast.Attribute | ast.Name))
        and ast.unparse(node.func).rpartition(".")[2] in ("Thread", "Timer", "start_new_thread")
    ]
    assert started == []
