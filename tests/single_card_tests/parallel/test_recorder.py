"""What the recorder knows, and how recordings of ranks are compared.

Guarantees: every function of paddle.distributed that parallel/ calls is either one that the
recorder watches or known to send nothing; the first difference of recordings is found on each
line of ranks, in order, whatever other lines hold; messages are compared with those at their other
end.
"""

import ast
from pathlib import Path

import paddle_vl.parallel
from paddle_vl.parallel.recorder import SITES, Collective, first_difference

FOLDER = Path(paddle_vl.parallel.__file__).parent
# Names of paddle.distributed that send nothing over a group of tensors: questions, types, modules,
# the making of groups.
SILENT = {
    "ReduceOp", "ParallelEnv", "get_rank", "get_world_size", "new_group", "stream", "fleet",
    "collective", "communication", "launch", "parallel",
}  # fmt: skip
# What sends inside of these is not ours to record.
MODULES = ("fleet", "collective")


def used_names(path: Path) -> set[str]:
    """What a file uses of paddle.distributed, dotted, e.g. `stream.all_gather`."""
    aliases, names = {}, set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "paddle.distributed" and alias.asname:
                    aliases[alias.asname] = ""
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = f"{node.module}.".removeprefix("paddle.distributed.")
            if node.module.startswith("paddle.distributed"):
                names |= {f"{module}{alias.name}" for alias in node.names}
            elif node.module == "paddle":
                aliases |= {a.asname or a.name: "" for a in node.names if a.name == "distributed"}
    for node in ast.walk(tree):
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        for alias in (*aliases, "paddle.distributed"):
            if dotted.startswith(f"{alias}."):
                names.add(dotted.removeprefix(f"{alias}."))
    return names


def test_all_that_is_sent_is_watched():
    watched = {
        f"stream.{name}" if "stream" in module.__name__ else name for module, name, _ in SITES
    }
    unknown = {}
    for path in sorted(FOLDER.rglob("*.py")):
        if path.name == "recorder.py":
            continue
        names = {
            name
            for name in used_names(path)
            if name.split(".")[0] not in MODULES
            and name not in watched
            and name.split("(")[0].split(".")[0] not in SILENT - {"stream"}
            and name != "stream"
        }
        if names:
            unknown[path.name] = names
    assert not unknown, "add it to recorder.SITES, or to SILENT here if it sends nothing"


def test_a_call_that_is_not_known_is_found(tmp_path):
    path = tmp_path / "new.py"
    path.write_text(
        "import paddle.distributed as dist\n"
        "from paddle.distributed import scatter\n"
        "dist.reduce(x)\ndist.stream.broadcast(x)\ndist.ReduceOp.MAX\n",
        encoding="utf-8",
    )
    found = used_names(path)
    assert {"scatter", "reduce", "stream.broadcast", "ReduceOp.MAX"} <= found


def sums(*sizes: int, ranks=(0, 1), phase="forward") -> list[Collective]:
    return [Collective(phase, "all_reduce", ranks, 4 * n, "float32", (n,)) for n in sizes]


def test_equal_recordings_do_not_differ():
    other = sums(7, ranks=(0, 2))
    # Rank 0 belongs to two lines; only the order on each counts.
    assert first_difference([[*sums(3), *other, *sums(5)], sums(3, 5), other]) is None


def test_the_first_difference_is_named():
    found = first_difference([sums(3, 5, 6), sums(3, 4, 7)])
    assert found == (
        "collective 2 of ranks [0, 1]: rank 0 all_reduce of float32 [5] in forward, "
        "rank 1 all_reduce of float32 [4] in forward"
    )
    found = first_difference([sums(3), sums(3, phase="backward")])
    assert "all_reduce of float32 [3] in backward" in found


def test_missing_collectives_are_a_difference():
    found = first_difference([sums(3, 4), sums(3)])
    assert found.endswith("rank 1 nothing, its last all_reduce of float32 [3] in forward")
    assert first_difference([sums(3), []]).endswith("rank 1 nothing at all")


def test_uneven_collectives_may_differ_in_rows():
    def exchange(rows):
        return [Collective("", "alltoall_single", (0, 1), 4 * rows, "float32", (rows,))]

    assert first_difference([exchange(3), exchange(5)]) is None
    assert first_difference([exchange(3), sums(3, phase="")]) is not None


def test_messages_are_compared_with_their_other_end():
    def message(kind, ranks, size):
        return Collective(kind, kind, ranks, 4 * size, "float32", (size,))

    sent, back = message("isend", (0, 1), 3), message("isend", (1, 0), 4)
    received, returned = message("irecv", (0, 1), 3), message("irecv", (1, 0), 4)
    assert first_difference([[sent, returned], [back, received]]) is None
    assert "message 1 of ranks [0, 1]" in first_difference([[sent], [message("irecv", (0, 1), 2)]])
