"""The recorder's lists of methods and operators, and the comparison of recordings."""

import re
from pathlib import Path

import paddle.distributed as dist
import pytest
from paddle.base import core

from paddle_vl.parallel import recorder
from paddle_vl.parallel.recorder import Collective, observed
from paddle_vl.testing import first_difference

DISTRIBUTED = Path(dist.__file__).parent
# Folders in which Paddle communicates under dynamic graphs.
FOLDERS = (
    "communication", "fleet/base", "fleet/layers", "fleet/meta_optimizers/dygraph_optimizer",
    "fleet/meta_parallel", "fleet/recompute", "fleet/utils",
)  # fmt: skip
# Operators that do not communicate.
LOCAL = {
    "bitwise_or", "c_embedding", "c_identity", "c_split", "check_finite_and_unscale", "dropout",
    "fused_gemm_epilogue", "fused_linear_param_grad_add", "linear", "matmul", "sync_calc_stream",
    "sync_comm_stream",
}  # fmt: skip
# Operators of static graphs and other devices, and an unused loss.
ELSEWHERE = {"reduce", "barrier", "c_softmax_with_multi_label_cross_entropy"}


def test_all_operators_of_fleet_that_send_are_watched():
    used = set()
    for folder in FOLDERS:
        for path in (DISTRIBUTED / folder).rglob("*.py"):
            used |= set(re.findall(r"_C_ops\.(\w+)\(", path.read_text(encoding="utf-8")))
    assert used - LOCAL - ELSEWHERE
    unknown = used - LOCAL - ELSEWHERE - set(recorder._OPERATORS)
    assert not unknown, "add it to recorder._OPERATORS, or to LOCAL here if it sends nothing"


def test_a_method_of_groups_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setattr(core.ProcessGroup, "all_to_some", lambda group: None, raising=False)
    before = core.ProcessGroup.all_reduce
    with pytest.raises(RuntimeError, match="a method all_to_some"), observed(print):
        pass
    assert core.ProcessGroup.all_reduce is before


def sums(*sizes: int, ranks=(0, 1), phase="forward") -> list[Collective]:
    return [Collective(phase, "all_reduce", ranks, 4 * n, "float32", (n,)) for n in sizes]


def uneven(rows: int) -> list[Collective]:
    return [Collective("", "alltoall_single", (0, 1), 4 * rows, "float32", (rows,))]


def message(kind: str, ranks: tuple, size: int) -> Collective:
    return Collective(kind, kind, ranks, 4 * size, "float32", (size,))


def test_the_first_difference_is_named():
    assert first_difference([sums(3, 5, 6), sums(3, 4, 7)]) == (
        "collective 2 of ranks [0, 1]: rank 0 all_reduce of float32 [5] in forward, "
        "rank 1 all_reduce of float32 [4] in forward"
    )


OTHER = sums(7, ranks=(0, 2))
BARE = Collective("", "broadcast", (0, 1), 4, "float32", ())
SENT, BACK = message("send", (0, 1), 3), message("send", (1, 0), 4)
# What ranks record, and a part of the difference; None where there is none.
RECORDINGS = [
    # Rank 0 is in two groups; only the order within each counts.
    ([[*sums(3), *OTHER, *sums(5)], sums(3, 5), OTHER], None),
    ([sums(3), sums(3, phase="backward")], "all_reduce of float32 [3] in backward"),
    ([sums(3, 4), sums(3)], "rank 1 nothing, its last all_reduce of float32 [3] in forward"),
    ([sums(3), []], "rank 1 nothing at all"),
    # Exchanges of rows may differ in how many.
    ([uneven(3), uneven(5)], None),
    ([uneven(3), sums(3, phase="")], "alltoall_single"),
    # A number is the same with and without an axis.
    ([[BARE], [BARE._replace(shape=(1,))]], None),
    ([[BARE], [BARE._replace(shape=(2,), num_bytes=8)]], "broadcast"),
    # Messages are compared with those recorded at their other end.
    ([[SENT, message("recv", (1, 0), 4)], [BACK, message("recv", (0, 1), 3)]], None),
    ([[SENT], [message("recv", (0, 1), 2)]], "message 1 of ranks [0, 1]"),
]


@pytest.mark.parametrize(("recordings", "part"), RECORDINGS)
def test_recordings_differ_in_what_matters(recordings, part):
    found = first_difference(recordings)
    assert found is None if part is None else part in found
