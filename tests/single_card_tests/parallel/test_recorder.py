"""The recorder's lists of methods and operators, and the comparison of recordings.

Guarantees: every method of Paddle's process groups, and every operator that fleet calls, is
recorded or known not to communicate; the first difference is found on each channel (a group, or two
ranks that exchange messages), in order; messages are compared with those recorded at the peer.
"""

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


def test_equal_recordings_do_not_differ():
    other = sums(7, ranks=(0, 2))
    # Rank 0 is in two groups; only the order within each counts.
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


def test_a_number_is_the_same_with_and_without_an_axis():
    bare = Collective("", "broadcast", (0, 1), 4, "float32", ())
    assert first_difference([[bare], [bare._replace(shape=(1,))]]) is None
    assert first_difference([[bare], [bare._replace(shape=(2,), num_bytes=8)]]) is not None


def test_messages_are_compared_with_their_other_end():
    def message(kind, ranks, size):
        return Collective(kind, kind, ranks, 4 * size, "float32", (size,))

    sent, back = message("send", (0, 1), 3), message("send", (1, 0), 4)
    received, returned = message("recv", (0, 1), 3), message("recv", (1, 0), 4)
    assert first_difference([[sent, returned], [back, received]]) is None
    assert "message 1 of ranks [0, 1]" in first_difference([[sent], [message("recv", (0, 1), 2)]])
