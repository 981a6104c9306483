"""Nothing under paddle_vl unpickles data from another rank.

Guarantees: no module uses a serializer that runs code, or Paddle's object collectives, which
pickle; connections between ranks carry bytes. Loader workers belong to one rank and use private
pipes.
"""

import ast
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


def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text(encoding="utf-8"))


def imported(module: str) -> set[str]:
    names = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("module", MODULES)
def test_no_module_uses_a_serializer_that_runs_code(module):
    assert not {name for name in imported(module) if name.split(".")[0] in SERIALIZERS}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            allowed = [k.value for k in node.keywords if k.arg == "allow_pickle"]
            assert all(isinstance(v, ast.Constant) and v.value is False for v in allowed)
            # This call reads pickles.
            assert ast.unparse(node.func) not in ("paddle.load", "np.lib.format.read_array")


@pytest.mark.parametrize("module", MODULES)
def test_no_module_lets_paddle_send_objects(module):
    names = {node.attr for node in ast.walk(tree(module)) if isinstance(node, ast.Attribute)}
    names |= {name.rpartition(".")[2] for name in imported(module)}
    assert not names & OBJECT_FUNCTIONS
    assert not any(name in (PACKAGE / module).read_text() for name in OBJECT_FUNCTIONS)


@pytest.mark.parametrize("module", MODULES)
def test_connections_between_ranks_carry_bytes(module):
    uses = {name for name in imported(module) if name.split(".")[0] == "multiprocessing"}
    if not uses or module in OWN_WORKERS:
        return
    assert all(name.startswith("multiprocessing.connection.") for name in uses)
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute):
            # Connection.send pickles, Connection.recv unpickles.
            assert node.attr not in ("send", "recv"), f"{module}: {ast.unparse(node)}"
