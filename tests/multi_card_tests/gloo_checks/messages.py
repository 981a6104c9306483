"""Point-to-point messages inside of a group, and groups that are created at the same time."""

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication as pp_p2p

from tests.multi_card_tests.gloo_checks.registry import (
    NOW_OR_TASK,
    assert_equal,
    check,
    message,
    rank,
    size,
    still_in_step,
    tensor,
)


@check(**NOW_OR_TASK)
def messages_leave_the_group_in_step(on_calc_stream):
    first, last = 0, size() - 1
    for source, target in ((first, last), (last, first), (first, 1)):
        x = message(source, target + 1, width=4) + 1
        if rank() == source:
            dist.stream.send(tensor(x)[:, 1:3], target, use_calc_stream=on_calc_stream)
        elif rank() == target:
            base = paddle.zeros(x.shape)
            dist.stream.recv(base[:, 1:3], source, use_calc_stream=on_calc_stream)
            x[:, [0, 3]] = 0
            assert_equal(base, x)
        still_in_step()


@check()
def every_pair_exchanges():
    for low in range(size()):
        for high in range(low + 1, size()):
            for source, target in ((low, high), (high, low)):
                if rank() == source:
                    dist.send(tensor([source, target], "bfloat16"), target)
                elif rank() == target:
                    received = paddle.zeros([2], "bfloat16")
                    dist.recv(received, source)
                    assert_equal(received, [source, target])
    still_in_step()


@check(sends_first=False, receives_first=True)
def ring_of_batched_messages(reverse):
    before, after = (rank() - 1) % size(), (rank() + 1) % size()
    # Both directions, with two messages in one of them.
    from_before = [paddle.zeros([2]), paddle.zeros([3])]
    from_after = paddle.zeros([1])
    operations = [
        dist.P2POp(dist.isend, paddle.full([2], float(rank())), after),
        dist.P2POp(dist.isend, paddle.full([3], 10.0 + rank()), after),
        dist.P2POp(dist.irecv, from_before[0], before),
        dist.P2POp(dist.irecv, from_before[1], before),
    ]
    operations += [
        dist.P2POp(dist.isend, paddle.full([1], 20.0 + rank()), before),
        dist.P2POp(dist.irecv, from_after, after),
    ]
    if reverse:
        operations = operations[2:] + operations[:2]
    for task in dist.batch_isend_irecv(operations):
        task.wait()
    assert_equal(from_before[0], [before] * 2)
    assert_equal(from_before[1], [10 + before] * 3)
    assert_equal(from_after, [20 + after])
    still_in_step()


@check()
def stages_send_to_each_other_at_once():
    if rank() > 1:
        return
    group, peer = dist.collective._get_default_group(), 1 - rank()
    received = paddle.zeros([2])
    pp_p2p.batch_send_recv_on_calc_stream(
        [
            pp_p2p.P2PonCalcStream(pp_p2p._send_on_calc_stream, tensor([rank(), 7.0]), peer, group),
            pp_p2p.P2PonCalcStream(pp_p2p._recv_on_calc_stream, received, peer, group),
        ]
    )
    assert_equal(received, [peer, 7])


@check()
def fleet_makes_the_groups_of_the_hybrid_degrees():
    hcg = fleet.get_hybrid_communicate_group()
    model, data = hcg.get_model_parallel_group(), hcg.get_data_parallel_group()
    assert (model.nranks, data.nranks) == (2, size() // 2)
    assert model.ranks == [rank() // 2 * 2, rank() // 2 * 2 + 1]
    assert data.ranks == list(range(rank() % 2, size(), 2))
    for group in (model, data):
        if group.nranks > 1:
            total = tensor([rank()])
            dist.all_reduce(total, group=group)
            assert_equal(total, [sum(group.ranks)])


@check()
def groups_made_at_the_same_time_all_work():
    whole = list(range(size()))
    for _ in range(3):
        groups = [dist.new_group(ranks) for ranks in (whole[::2], whole[1::2], whole[::-1], [0, 1])]
        for group in groups:
            if group.is_member() and group.nranks > 1:
                total = tensor([rank()])
                dist.all_reduce(total, group=group)
                assert_equal(total, [sum(group.ranks)])


@check()
def messages_in_a_subgroup_name_global_ranks():
    ranks = list(range(size()))[-2:]
    group = dist.new_group(ranks)
    if rank() == ranks[0]:
        dist.send(tensor([5.0]), ranks[1], group=group)
    elif rank() == ranks[1]:
        received = paddle.zeros([1])
        dist.recv(received, ranks[0], group=group)
        assert_equal(received, [5])
