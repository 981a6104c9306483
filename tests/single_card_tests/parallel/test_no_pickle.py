"""Nothing under paddle_vl unpickles data from another rank.

No module uses a serializer that runs code, or Paddle's object collectives, which pickle.
Connections between ranks carry bytes; loader workers belong to one rank and use private pipes.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import paddle_vl

PACKAGE = Path(paddle_vl.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
SERIALIZERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
OBJECT_FUNCTIONS = {
    "all_gather_object", "broadcast_object_list", "scatter_object_list", "gather_object",
}  # fmt: skip
# Multiprocessing between a rank and its own workers.
OWN_WORKERS = {"data/worker_pool.py"}


def imported(code: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def faults(module: str, source: str) -> Iterator[str]:
    """What a module does that could unpickle another rank's bytes."""
    code = ast.parse(source)
    names = imported(code)
    yield from (name for name in names if name.split(".")[0] in SERIALIZERS)
    yield from (name for name in OBJECT_FUNCTIONS if name in source)
    connects = {name for name in names if name.split(".")[0] == "multiprocessing"}
    connects -= {"multiprocessing.AuthenticationError"}
    if module in OWN_WORKERS:
        connects = set()
    yield from (n for n in connects if not n.startswith("multiprocessing.connection."))
    for node in ast.walk(code):
        if isinstance(node, ast.Call):
            allowed = [k.value for k in node.keywords if k.arg == "allow_pickle"]
            if not all(isinstance(v, ast.Constant) and v.value is False for v in allowed):
                yield ast.unparse(node)
            # This call reads pickles.
            if ast.unparse(node.func) in ("paddle.load", "np.lib.format.read_array"):
                yield ast.unparse(node)
        # Connection.send pickles, Connection.recv unpickles.
        elif connects and isinstance(node, ast.Attribute) and node.attr in ("send", "recv"):
            yield ast.unparse(node)


def test_no_module_unpickles_what_another_rank_sends():
    found = {
        module: list(faults(module, (PACKAGE / module).read_text(encoding="utf-8")))
        for module in MODULES
    }
    assert len(found) > 100
    assert {module: of_module for module, of_module in found.items() if of_module} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from joblib import load", "np.load(file, allow_pickle=True)",
        "np.load(file, allow_pickle=given)", "paddle.load(path)", "dist.all_gather_object(a, b)",
        "from paddle.distributed import broadcast_object_list", "import multiprocessing",
        "from multiprocessing.connection import Client\nClient(a).send(b)",
    ],
)  # fmt: skip
def test_each_fault_is_found(source):
    assert list(faults("parallel/x.py", source))
    assert not list(faults("parallel/x.py", "np.load(file, allow_pickle=False)"))
